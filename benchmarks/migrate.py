"""Move an agent of 4,000 tokens while its answer streams, as a client sees it.

`macfabric up` runs two nodes; one client streams answers and another moves the agent to and fro
in the middle of them. The text must be that of an answer that nobody disturbed. What a move
costs the client is the longest gap between two tokens; what it saves is the prefill on the
other node.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Limit, Report, say

DESCRIPTION = "an agent moved while it streams: every token once, the pause, and what it saves"

TOKENS, QUICK_TOKENS = 4_000, 600
ANSWER_TOKENS = 96
MOVE_AT = 24
ROUNDS, QUICK_ROUNDS = 5, 1
STEPS_MAX = 3
GIGABIT_BYTES_PER_S = 118e6  # of payload on gigabit Ethernet
PREFILL_RATIO_MIN = 10.0
_START_S, _STOP_S = 120.0, 60.0
_WORDS = ("river", "stone", "lantern", "copper", "meadow", "violin", "harbor", "winter", "orchard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="recall")


@dataclass(slots=True)
class Stream:
    """One answer as it arrived."""

    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    node: str = ""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    @property
    def gaps_s(self) -> list[float]:
        """Times between neighbouring chunks."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.began_s


def run(arguments: argparse.Namespace) -> Report:
    """Run the benchmark."""
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    tokens = QUICK_TOKENS if arguments.quick else TOKENS
    with _fabric(arguments.model) as url:
        client = _Client(url, arguments.model)
        moves = []
        for index in range(rounds):
            # Another document each time: nothing of it is on the other node.
            move = _move_during(client, _messages(tokens, index), f"mover-{index}")
            moves.append(move)
            say(f"{index + 1} of {rounds}: longest gap {max(move.answer.gaps_s):.3f} s")
    return _report(moves)


@dataclass(frozen=True, slots=True)
class Move:
    """One agent's answers: computed cold, from memory, and moved in the middle."""

    cold: Stream
    calm: Stream
    answer: Stream
    receipt: dict[str, Any]


def _report(moves: list[Move]) -> Report:
    itl_s = statistics.median(gap for move in moves for gap in move.calm.gaps_s)
    pauses_s = [max(move.answer.gaps_s) for move in moves]
    pause_s = statistics.median(pauses_s)
    receipts = [move.receipt for move in moves]
    allowed_s = STEPS_MAX * itl_s + _tail_bytes(receipts) / GIGABIT_BYTES_PER_S
    wrong = sum(move.answer.text != move.calm.text for move in moves)
    sent = statistics.median(receipt["bytes_sent"] for receipt in receipts)
    shipped_s = pause_s + sent / GIGABIT_BYTES_PER_S
    cold_s = statistics.median(move.cold.ttft_s for move in moves)
    calm, rounds = moves[0].calm, len(moves)
    return Report(
        parameters={"prompt tokens": calm.prompt_tokens, "rounds": rounds, "moved at": MOVE_AT},
        figures={
            "ITL undisturbed [s]": itl_s,
            "longest gap of a move [s]": pause_s,
            "longest gaps [s]": pauses_s,
            "sealed [s]": statistics.median(r["pause_seconds"] for r in receipts),
            "whole move [s]": statistics.median(r["seconds"] for r in receipts),
            "bytes sent": sent,
            "prefill on the target [s]": cold_s,
        },
        ratios={"prefill by pause and transfer at 1 Gbit/s": cold_s / shipped_s},
        limits=(
            Limit("answers that differ from the undisturbed one", wrong, 0, is_least=False),
            Limit("longest gap by 3 steps and the tail's time [x]", pause_s / allowed_s, 1.0,
                  is_least=False),
            Limit("prefill on the target by a move over 1 Gbit/s [x]", cold_s / shipped_s,
                  PREFILL_RATIO_MIN, is_least=True),
        ),
        notes=("loopback: the time of the tail on a gigabit link is added by arithmetic",),
    )  # fmt: skip


def _tail_bytes(receipts: list[dict[str, Any]]) -> float:
    """Bytes that travel while the agent is sealed: the blocks of the answer so far."""
    per_block = [r["bytes_sent"] / max(1, r["blocks_sent"]) for r in receipts]
    return statistics.median(per_block)


def _messages(tokens: int, seed: int = 0) -> list[dict[str, str]]:
    """Return a long document and a request to recite its beginning."""
    words = [f"{_WORDS[i * 7 % len(_WORDS)]}{i * 31 % 997}" for i in range(tokens // 4)]
    document = f"Report {100 + seed}. " + " ".join(words)
    return [
        {"role": "user", "content": document},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": " ".join(document.split()[:8])},
    ]


class _Client:
    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = Path(model).name

    def stream(
        self, messages: list[dict[str, str]], agent: str, moved: threading.Event | None = None
    ) -> Stream:
        """Stream one answer; set `moved` when it is time to move."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        out = Stream(began_s=time.perf_counter())
        with self._post("/v1/chat/completions", body, {"x-agent-id": agent}) as answer:
            out.node = answer.headers["x-macfabric-node"]
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                self._take(json.loads(line[6:]), out)
                if moved is not None and len(out.texts) >= MOVE_AT:
                    moved.set()
        return out

    @staticmethod
    def _take(chunk: dict[str, Any], out: Stream) -> None:
        if chunk.get("usage"):
            out.prompt_tokens = chunk["usage"]["prompt_tokens"]
            out.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if text:
                out.texts.append(text)
                out.times_s.append(time.perf_counter())

    def migrate(self, agent: str, target: str) -> dict[str, Any]:
        with self._post(f"/v1/agents/{agent}/migrate", {"to": target}, {}) as answer:
            return dict(json.load(answer))

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - our own loopback endpoint
            self._url + path,
            json.dumps(body).encode(),
            {"content-type": "application/json", **headers},
        )
        return urllib.request.urlopen(request, timeout=600)  # noqa: S310


def _move_during(client: _Client, messages: list[dict[str, str]], agent: str) -> Move:
    answers: list[Stream] = []
    ready = threading.Event()

    def listen() -> None:
        answers.append(client.stream(messages, agent, ready))

    cold = client.stream(messages, agent)
    calm = client.stream(messages, agent)
    target = "node-b" if calm.node == "node-a" else "node-a"
    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait(120)
    receipt = client.migrate(agent, target)
    listener.join()
    return Move(cold, calm, answers[0], receipt)


@contextmanager
def _fabric(model: str) -> Iterator[str]:
    """Run `macfabric up` with two nodes; yield its address."""
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - a short path, 0700
    with tempfile.TemporaryDirectory(prefix="mf-bench-", dir=parent) as folder:
        command = [sys.executable, "-m", "router.cli.main", "up", "--json", "--nodes", "2"]
        command += ["--port", "0", "--data", folder, "--model", model]
        log = Path(folder) / "up.log"
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            say("starting two nodes")
            yield _ready_url(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_S)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "piped"
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        line = process.stdout.readline()
        if not line:
            break
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("url"):
            return str(event["url"])
    message = "macfabric up did not become ready"
    raise RuntimeError(message)
