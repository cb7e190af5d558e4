"""Two agents arrive one after the other: the second one's wait, and the first one's delay.

    alone       each agent by itself
    together    the second arrives during the first one's prefill or answer
    in line     as if the second waited for the end of the first: computed from `alone`

Source of the setup: "Agent Memory Below the Prompt" (2026), appendix F.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.measured_cells import MeasuredCells, add_keep_argument
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Limit, Report, environment, say
from benchmarks.servers import UNDISTURBED, running_fabric

DESCRIPTION = "two agents, one after the other: first tokens together, against waiting in line"

CONTEXT, QUICK_CONTEXT = 4_096, 1_024
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 64, 16
DELAY_S, QUICK_DELAY_S = 2.0, 0.3
ROUNDS, QUICK_ROUNDS = 5, 1
STATES = ("cold", "hot", "disk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--context", type=int, help=f"tokens of each agent (default: {CONTEXT})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--delay-s", type=float, help=f"between the two arrivals (default: {DELAY_S})"
    )
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure every pair of states."""
    quick = arguments.quick
    delay_s = arguments.delay_s or (QUICK_DELAY_S if quick else DELAY_S)
    answer_tokens = QUICK_ANSWER_TOKENS if quick else ANSWER_TOKENS
    with model_folder(arguments) as model:
        parameters = {
            "model": model.name,
            "context tokens": arguments.context or (QUICK_CONTEXT if quick else CONTEXT),
            "answer tokens": answer_tokens,
            "delay [s]": delay_s,
            "rounds": arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        }
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        with running_fabric(str(model), settings=UNDISTURBED) as url, cells.until_interrupted():
            pairs = _Pairs(ChatClient(url, model.name), model, parameters)
            for first in STATES:
                for second in STATES:
                    if f"{first}, {second}" not in cells:
                        say(f"{first}, then {second}")
                        cells.add(f"{first}, {second}", pairs.measure(first, second))
    cells.finish()
    return _report(cells, parameters)


class _Pairs:
    """Pairs of agents on one node."""

    def __init__(self, client: ChatClient, model: Path, parameters: Mapping[str, Any]) -> None:
        self._client = client
        self._model = model
        self._context_tokens = int(parameters["context tokens"])
        self._answer_tokens = int(parameters["answer tokens"])
        self._delay_s = float(parameters["delay [s]"])
        self._rounds = int(parameters["rounds"])
        self._count = 0

    def measure(self, first: str, second: str) -> dict[str, list[float]]:
        """Return the seconds of each round, alone and together."""
        figures: dict[str, list[float]] = {}
        for _ in range(self._rounds):
            alone = [self._answer(*self._agent(state)) for state in (first, second)]
            together = self._together(self._agent(first), self._agent(second))
            samples = {
                "first alone": alone[0].ttft_s,
                "first together": together[0].ttft_s,
                "second alone": alone[1].ttft_s,
                "second together": together[1].ttft_s,
                "second in line": max(0.0, alone[0].total_s - self._delay_s) + alone[1].ttft_s,
                "both, together": together[1].ended_s - together[0].began_s,
                "both, in line": max(self._delay_s, alone[0].total_s) + alone[1].total_s,
            }
            for name, value in samples.items():
                figures.setdefault(name, []).append(value)
        return figures

    def _agent(self, state: str) -> tuple[str, list[Message]]:
        """Return a new agent whose cache is in a state, and its next prompt."""
        self._count += 1
        name = f"pair-{self._count}"
        messages = [user(text_of(self._model, self._context_tokens, name))]
        if state != "cold":
            messages.append(self._client.chat(messages, 1, agent=name).message())
            messages.append(user("What next?"))
        if state == "disk":
            self._client.call(f"/v1/agents/{name}/evict", {"from": "memory"})
        return name, messages

    def _answer(self, agent: str, messages: Sequence[Message]) -> ChatAnswer:
        return self._client.chat(messages, self._answer_tokens, agent=agent)

    def _together(
        self, first: tuple[str, list[Message]], second: tuple[str, list[Message]]
    ) -> tuple[ChatAnswer, ChatAnswer]:
        answers: list[ChatAnswer] = []
        asking = threading.Thread(target=lambda: answers.append(self._answer(*first)))
        asking.start()
        time.sleep(self._delay_s)
        later = self._answer(*second)
        asking.join()
        return answers[0], later


def _report(cells: MeasuredCells, parameters: Mapping[str, Any]) -> Report:
    tables: dict[str, dict[str, float]] = {}
    ratios, limits = {}, []
    for first in STATES:
        for second in STATES:
            cell = cells.get(f"{first}, {second}")
            if cell is None:
                continue
            row = {name: statistics.median(values) for name, values in cell.items()}
            tables[f"{first}, then {second}"] = row
            ratio = row["second in line"] / row["second together"]
            ratios[f"{first}, then {second}: in line by together"] = ratio
            if first == "cold" and second != "cold":
                statement = f"{first}, then {second}: second's first token, in line by together [x]"
                limits.append(Limit(statement, ratio, 1.0, is_least=True))
    notes = ["seconds to first tokens; `both`: from the first arrival to the last token"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    figures = {"seconds": tables}
    return Report(parameters, figures, ratios, tuple(limits), tuple(notes))
