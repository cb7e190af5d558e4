"""Move an agent of 4,000 tokens while its answer streams, measured at the client.

`macfabric up` runs two nodes; one client streams answers and another moves the agent to and fro
during them. The text must be that of an undisturbed answer. A move's cost for the client is the
longest gap between two tokens; its saving is the prefill on the other node.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.control_calls import measure_calls
from benchmarks.prompts import QUICK_MODEL, add_model_argument, model_folder
from benchmarks.report import Limit, Report, say
from benchmarks.servers import running_fabric

DESCRIPTION = "an agent moved while it streams: every token once, the pause, and what it saves"

TOKENS, QUICK_TOKENS = 4_000, 600
ANSWER_TOKENS = 96
MOVE_AT = 24
ROUNDS, QUICK_ROUNDS = 5, 1
STEPS_MAX = 3
GIGABIT_BYTES_PER_S = 118e6  # of payload on gigabit Ethernet
PREFILL_RATIO_MIN = 10.0
_WORDS = ("river", "stone", "lantern", "copper", "meadow", "violin", "harbor", "winter", "orchard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_model_argument(parser, default=QUICK_MODEL)
    parser.add_argument(
        "--busy", type=int, default=0, help="repeat each move beside so many busy processes"
    )


def run(arguments: argparse.Namespace) -> Report:
    """Run the benchmark."""
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    tokens = QUICK_TOKENS if arguments.quick else TOKENS
    with model_folder(arguments) as model, running_fabric(str(model), nodes=2) as url:
        client = ChatClient(url, model.name)
        moves, crowded = [], []
        for index in range(rounds):
            # Another document each time, so that the other node has no part of it.
            move = _move_during(client, _messages(tokens, index), f"mover-{index}")
            moves.append(move)
            summary = f"longest gap {move.pause_s:.3f} s"
            if arguments.busy:
                messages = _messages(tokens, rounds + index)
                with busy_processes(arguments.busy):
                    crowded.append(_move_during(client, messages, f"crowded-{index}"))
                summary += f", beside busy processes {crowded[-1].pause_s:.3f} s"
            say(f"{index + 1} of {rounds}: {summary}")
    report = _report(moves, measure_calls(quick=arguments.quick))
    return report if not crowded else _with_crowded(report, moves, crowded, arguments.busy)


@dataclass(frozen=True, slots=True)
class Move:
    """Answers of one agent: computed cold, from memory, and moved in the middle."""

    cold: ChatAnswer
    calm: ChatAnswer
    answer: ChatAnswer
    receipt: dict[str, Any]

    @property
    def pause_s(self) -> float:
        """Longest time without a token during the move."""
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
            "one control call": calls,
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
    """Add the figures of the same moves beside busy processes, which have no limits."""
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
    """Return the bytes sent while the agent is sealed: the blocks of the answer so far."""
    per_block = [r["bytes_sent"] / max(1, r["blocks_sent"]) for r in receipts]
    return float(statistics.median(per_block))


def _messages(tokens: int, seed: int = 0) -> list[Message]:
    """Return a long document and a request to recite its beginning."""
    words = [f"{_WORDS[i * 7 % len(_WORDS)]}{i * 31 % 997}" for i in range(tokens // 4)]
    document = f"Report {100 + seed}. " + " ".join(words)
    return [
        {"role": "user", "content": document},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": " ".join(document.split()[:8])},
    ]


def _move_during(client: ChatClient, messages: list[Message], agent: str) -> Move:
    answers: list[ChatAnswer] = []
    ready = threading.Event()

    def listen() -> None:
        try:
            answers.append(
                client.chat(
                    messages,
                    ANSWER_TOKENS,
                    agent=agent,
                    on_part=lambda count: ready.set() if count >= MOVE_AT else None,
                )
            )
        finally:
            ready.set()

    cold = client.chat(messages, ANSWER_TOKENS, agent=agent)
    calm = client.chat(messages, ANSWER_TOKENS, agent=agent)
    target = "node-b" if calm.headers["x-macfabric-node"] == "node-a" else "node-a"
    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait()
    receipt = client.call(f"/v1/agents/{agent}/migrate", {"to": target})
    listener.join()
    return Move(cold, calm, answers[0], receipt)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy during a block of code."""
    spin = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"
    command = [sys.executable, "-c", spin, str(os.getpid())]  # they end with this process
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
