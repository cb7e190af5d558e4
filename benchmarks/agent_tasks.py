"""Agents' histories under each policy and edit mode: recomputed tokens and changed answers.

Traces of tool loops are replayed step by step. At each step the model has to call a tool; its next
tokens and the tool's name are compared with those of the same step with the whole history. A
policy that shortens the history changes the prompt, so agreement below 1 is its price, not a fault;
the difference between `amortize` and `exact` is the price of kept memory.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from benchmarks.agent_traces import Step, schemas, trace
from benchmarks.chat_client import ChatAnswer, ChatClient
from benchmarks.local_fabric import local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.report import Limit, Report, environment, say
from fabric.settings import NodeSettings

DESCRIPTION = "tool loops of 50 steps under each policy and edit mode: agreement, work, seconds"

STEPS, QUICK_STEPS = 50, 10
TRACES, QUICK_TRACES = 3, 1
ANSWER_TOKENS = 48
WHOLE = "whole history, exact"
TOOL_PARSER = "json"  # syntax of calls for models whose templates define none
POLICIES = ("truncate_older_than", "drop_failed_tool_calls", "strip_thinking", "summarize_to_stub")
MODES = ("exact", "amortize")


@dataclass(frozen=True, slots=True)
class Arm:
    """Policy that edits the history, and mode in which the cache follows."""

    policy: str
    mode: str

    @property
    def name(self) -> str:
        """The arm's name in reports."""
        policy = "whole history" if self.policy == "keep_all" else self.policy
        return f"{policy}, {self.mode}"


ARMS = (Arm("keep_all", "exact"), *(Arm(policy, mode) for policy in POLICIES for mode in MODES))
QUICK_ARMS = (ARMS[0], ARMS[1], ARMS[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")
    parser.add_argument("--steps", type=int, help=f"of each trace (default: {STEPS})")
    parser.add_argument("--traces", type=int, help=f"default: {TRACES}")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Replay every trace in every arm."""
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    count = arguments.traces or (QUICK_TRACES if arguments.quick else TRACES)
    arms = QUICK_ARMS if arguments.quick else ARMS
    parameters = {"model": arguments.model, "steps": steps, "traces": count}
    cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
    traces = [trace(steps, seed) for seed in range(count)]
    with cells.until_interrupted():
        references = _answers(arguments.model, ARMS[0], traces)
        for arm in arms:
            if arm.name not in cells:
                answers = references if arm is ARMS[0] else _answers(arguments.model, arm, traces)
                cells.add(arm.name, _figures(answers, references))
    cells.finish()
    return _report(cells, parameters, arms)


def _answers(model: str, arm: Arm, traces: Sequence[Sequence[Step]]) -> list[ChatAnswer]:
    """Replay the traces on a fresh node."""
    say(arm.name)
    settings = NodeSettings(durability="none", popular_bytes=0, tool_parser=TOOL_PARSER)
    with local_fabric(model, settings=settings) as fabric:
        client = fabric.client()
        return [
            _step(client, arm, f"task-{number}", step)
            for number, steps in enumerate(traces)
            for step in steps
        ]


def _step(client: ChatClient, arm: Arm, agent: str, step: Step) -> ChatAnswer:
    extra = {
        "tools": schemas(),
        "tool_choice": "required",
        "macfabric": {"policies": [arm.policy], "edits": arm.mode},
    }
    return client.chat(step.messages, ANSWER_TOKENS, agent=agent, ignore_eos=False, extra=extra)


def _figures(answers: Sequence[ChatAnswer], references: Sequence[ChatAnswer]) -> Figures:
    pairs = list(zip(answers, references, strict=True))
    return {
        "prompt tokens": [float(answer.prompt_tokens) for answer in answers],
        "computed tokens": [float(a.prompt_tokens - a.cached_tokens) for a in answers],
        "first token [s]": [answer.ttft_s for answer in answers],
        "same tool": [float(_tool(a) == _tool(b)) for a, b in pairs],
        "same beginning of the call": [_same_share(a, b) for a, b in pairs],
    }


def _tool(answer: ChatAnswer) -> str:
    return answer.calls[0][0] if answer.calls else ""


def _same_share(answer: ChatAnswer, reference: ChatAnswer) -> float:
    """Return the share of the reference's call that matches from its beginning, in characters."""
    ours, theirs = ("".join("".join(call) for call in each.calls) for each in (answer, reference))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return sum(1 for _ in alike) / max(1, len(theirs))


def _report(cells: MeasuredCells, parameters: dict[str, Any], arms: Sequence[Arm]) -> Report:
    table: dict[str, dict[str, float]] = {}
    for arm in arms:
        cell = cells.get(arm.name)
        if cell is not None:
            row = {name: statistics.fmean(values) for name, values in cell.items()}
            row["computed share"] = row["computed tokens"] / row["prompt tokens"]
            table[arm.name] = row
    limits, ratios = [], {}
    for policy in dict.fromkeys(arm.policy for arm in arms[1:]):
        exact, kept = (table.get(Arm(policy, mode).name) for mode in MODES)
        if exact and kept:
            ratio = exact["computed tokens"] / kept["computed tokens"]
            ratios[f"{policy}: tokens computed, exact by amortize"] = ratio
            statement = f"{policy}: tokens computed, exact by amortize [x]"
            limits.append(Limit(statement, ratio, 1.0, is_least=True))
    notes = ["means over all steps; agreement with the same step of the whole, exact history"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, {"arm": table}, ratios, tuple(limits), tuple(notes))
