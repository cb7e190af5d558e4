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
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from benchmarks.control_calls import measure_calls
from benchmarks.report import Limit, Report, open_directly, say

DESCRIPTION = "an agent moved while it streams: every token once, the pause, and what it saves"

TOKENS, QUICK_TOKENS = 4_000, 600
ANSWER_TOKENS = 96
MOVE_AT = 24
ROUNDS, QUICK_ROUNDS = 5, 1
STEPS_MAX = 3
GIGABIT_BYTES_PER_S = 118e6  # of payload on gigabit Ethernet
PREFILL_RATIO_MIN = 10.0
_START_S, _STOP_S, _PATIENCE_S = 120.0, 60.0, 60.0
_WORDS = ("river", "stone", "lantern", "copper", "meadow", "violin", "harbor", "winter", "orchard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="recall")
    parser.add_argument(
        "--busy", type=int, default=0, help="repeat each move beside so many busy processes"
    )


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
        moves, crowded = [], []
        for index in range(rounds):
            # Another document each time: nothing of it is on the other node.
            move = _move_during(client, _messages(tokens, index), f"mover-{index}")
            moves.append(move)
            said = f"longest gap {move.pause_s:.3f} s"
            if arguments.busy:
                messages = _messages(tokens, rounds + index)
                with busy_processes(arguments.busy):
                    crowded.append(_move_during(client, messages, f"crowded-{index}"))
                said += f", beside busy processes {crowded[-1].pause_s:.3f} s"
            say(f"{index + 1} of {rounds}: {said}")
    report = _report(moves, measure_calls(quick=arguments.quick))
    return report if not crowded else _with_crowded(report, moves, crowded, arguments.busy)


@dataclass(frozen=True, slots=True)
class Move:
    """One agent's answers: computed cold, from memory, and moved in the middle."""

    cold: Stream
    calm: Stream
    answer: Stream
    receipt: dict[str, Any]

    @property
    def pause_s(self) -> float:
        """The longest time without a token while it moved."""
        return max(self.answer.gaps_s)


def _report(moves: list[Move], calls: dict[str, dict[str, float]]) -> Report:
    itl_s = _itl_s(moves)
    pauses_s = [move.pause_s for move in moves]
    pause_s = statistics.median(pauses_s)
    receipts = [move.receipt for move in moves]
    allowed_s = _allowed_s(moves)
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
            "one call in haste": calls,
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


def _with_crowded(report: Report, moves: list[Move], crowded: list[Move], busy: int) -> Report:
    """Add what the same moves took beside busy processes; no limit judges these."""
    quiet_s, pause_s = (statistics.median(m.pause_s for m in each) for each in (moves, crowded))
    wrong = sum(move.answer.text != move.calm.text for move in crowded)
    figures = {
        "busy: ITL undisturbed [s]": _itl_s(crowded),
        "busy: longest gap of a move [s]": pause_s,
        "busy: longest gaps [s]": [move.pause_s for move in crowded],
        "busy: sealed [s]": statistics.median(m.receipt["pause_seconds"] for m in crowded),
    }
    ratios = {
        "longest gap by 3 steps and the tail's time": quiet_s / _allowed_s(moves),
        "busy: longest gap by 3 steps (then) and the tail's time": pause_s / _allowed_s(crowded),
        "busy: longest gap by 3 steps (else) and the tail's time": pause_s / _allowed_s(moves),
        "longest gap, busy by else": pause_s / quiet_s,
    }
    return replace(
        report,
        parameters={**report.parameters, "busy processes": busy},
        figures={**report.figures, **figures},
        ratios={**report.ratios, **ratios},
        limits=(
            *report.limits,
            Limit("busy: answers that differ from the undisturbed one", wrong, 0, is_least=False),
        ),
    )


def _itl_s(moves: list[Move]) -> float:
    return statistics.median(gap for move in moves for gap in move.calm.gaps_s)


def _allowed_s(moves: list[Move]) -> float:
    tail_s = _tail_bytes([move.receipt for move in moves]) / GIGABIT_BYTES_PER_S
    return STEPS_MAX * _itl_s(moves) + tail_s


def _tail_bytes(receipts: list[dict[str, Any]]) -> float:
    """Bytes that travel while the agent is sealed: the blocks of the answer so far."""
    per_block = [r["bytes_sent"] / max(1, r["blocks_sent"]) for r in receipts]
    return float(statistics.median(per_block))


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
        answer, began_s = self._post("/v1/chat/completions", body, {"x-agent-id": agent})
        out = Stream(began_s=began_s)
        with answer:
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
        answer, _ = self._post(f"/v1/agents/{agent}/migrate", {"to": target}, {})
        with answer:
            return dict(json.load(answer))

    def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[HTTPResponse, float]:
        """Return the answer and when it was asked for; come again where one is told to."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._post_once(path, body, headers)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline_s:
                    raise
                say(f"refused for now: {error.read().decode()}")
                time.sleep(float(error.headers.get("retry-after", 1)))

    def _post_once(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[HTTPResponse, float]:
        began_s = time.perf_counter()
        request = urllib.request.Request(  # noqa: S310 - our own loopback endpoint
            self._url + path,
            json.dumps(body).encode(),
            {"content-type": "application/json", **headers},
        )
        return open_directly(request, 600), began_s


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
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    spin = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"
    command = [sys.executable, "-c", spin, str(os.getpid())]  # ends with this process at the latest
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
