"""Total cost of a directive on a node, from its request to the first token of the next turn.

    none       the agent's next turn without an edit
    amortize   the cache after the edited message is kept, and moved
    exact      everything after the edited message is computed again
    cold       the edited conversation, computed by an agent without a cache

Then many edits in one conversation: the reuse and the time to first token of each further turn.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.local_fabric import local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Chart, Limit, Report, environment, say

DESCRIPTION = "a directive's whole cost to the next first token, and reuse after many of them"

CONTEXTS, QUICK_CONTEXTS = (4_096, 16_384, 32_768), (768,)
MESSAGES = 16  # of a conversation, half of them answers
EDITED = 1  # the number of the message that is replaced, counted from 0
EDITS, QUICK_EDITS = (1, 2, 4, 8), (1, 2)
EDITS_CONTEXT, QUICK_EDITS_CONTEXT = 8_192, 1_024
ROUNDS, QUICK_ROUNDS = 3, 1
ANSWER_TOKENS = 8
STUB = "[cleared]"
MODES = ("amortize", "exact")
EXACT_RATIOS_MIN = {4_096: 2.0, 16_384: 5.0, 32_768: 10.0}  # exact by amortize, of first tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--rounds", type=int, help=f"of each cell (default: {ROUNDS})")
    parser.add_argument("--contexts", help="tokens, separated by commas")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure each context, then each number of edits."""
    quick = arguments.quick
    contexts: Sequence[int] = QUICK_CONTEXTS if quick else CONTEXTS
    if arguments.contexts:
        contexts = tuple(int(word) for word in arguments.contexts.split(","))
    rounds = arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    edits = QUICK_EDITS if quick else EDITS
    with model_folder(arguments) as model:
        parameters = {"model": model.name, "rounds": rounds, "messages": MESSAGES}
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        with local_fabric(str(model)) as fabric, cells.until_interrupted():
            talks = _Talks(fabric.client(), model)
            for context in contexts:
                if f"{context}" not in cells:
                    say(f"{context} tokens")
                    cells.add(f"{context}", _merged(talks.edited(context) for _ in range(rounds)))
            context = QUICK_EDITS_CONTEXT if quick else EDITS_CONTEXT
            for mode in MODES:
                name = f"{context} tokens, {mode}"
                if name not in cells:
                    say(f"up to {edits[-1]} edits, {mode}")
                    cells.add(name, talks.edited_often(context, mode, edits[-1]))
    cells.finish()
    return _report(cells, parameters, contexts, context, edits)


class _Talks:
    """Conversations of one node."""

    def __init__(self, client: ChatClient, model: Path) -> None:
        self._client = client
        self._model = model
        self._count = 0

    def edited(self, context: int) -> dict[str, float]:
        """Edit one agent in each mode; return the seconds to the first token of the next turn."""
        figures: dict[str, float] = {}
        for mode in MODES:
            agent, talk = self._agent(context)
            if mode == MODES[0]:
                figures["none"] = self._turn(agent, talk).ttft_s
            answer, direct_s = self._edit(agent, talk, EDITED, mode)
            figures[f"{mode}: request"] = direct_s
            figures[mode] = direct_s + answer.ttft_s
            figures[f"{mode}: cached"] = answer.cached_tokens / answer.prompt_tokens
        unknown = self._talk(f"cold-{self._count}", context)
        unknown[EDITED]["content"] = STUB
        figures["cold"] = self._ask(f"cold-{self._count}", unknown).ttft_s
        return figures

    def edited_often(self, context: int, mode: str, edits: int) -> Figures:
        """Edit message after message of one agent, with a turn after each."""
        agent, talk = self._agent(context)
        figures: Figures = {"cached": [], "first token": []}
        for number in range(edits):
            answer, direct_s = self._edit(agent, talk, EDITED + number, mode)
            figures["cached"].append(answer.cached_tokens / answer.prompt_tokens)
            figures["first token"].append(direct_s + answer.ttft_s)
        return figures

    def _agent(self, context: int) -> tuple[str, list[Message]]:
        """Return a new agent and its conversation, which has had a turn."""
        self._count += 1
        agent = f"agent-{self._count}"
        talk = self._talk(agent, context)
        self._turn(agent, talk)
        return agent, talk

    def _talk(self, seed: str, context: int) -> list[Message]:
        """Return a conversation of `context` tokens."""
        talk: list[Message] = []
        for number in range(MESSAGES):
            role = "assistant" if number % 2 else "user"
            text = text_of(self._model, context // MESSAGES, f"{seed}-{number}")
            talk.append({"role": role, "content": text})
        return [*talk, user("What of all this matters most?")]

    def _edit(
        self, agent: str, talk: list[Message], number: int, mode: str
    ) -> tuple[ChatAnswer, float]:
        """Replace a message by a stub; return the next turn and the directive's seconds."""
        directive = {"message": number, "replacement": STUB, "mode": mode}
        path = f"/v1/agents/{agent}/directives"
        directed_s = self._client.timed_call(path, {"directives": [directive]})
        return self._turn(agent, talk), directed_s

    def _turn(self, agent: str, talk: list[Message]) -> ChatAnswer:
        answer = self._ask(agent, talk)
        talk += [answer.message(), user("And what next?")]
        return answer

    def _ask(self, agent: str, talk: Sequence[Message]) -> ChatAnswer:
        return self._client.chat(talk, ANSWER_TOKENS, agent=agent)


def _merged(rounds: Any) -> Figures:
    merged: Figures = {}
    for figures in rounds:
        for name, value in figures.items():
            merged.setdefault(name, []).append(value)
    return merged


def _report(
    cells: MeasuredCells,
    parameters: Mapping[str, Any],
    contexts: Sequence[int],
    edits_context: int,
    edits: Sequence[int],
) -> Report:
    table: dict[str, dict[str, float]] = {}
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    ratios, limits = {}, []
    for context in contexts:
        cell = cells.get(f"{context}")
        if cell is None:
            continue
        row = {name: statistics.median(values) for name, values in cell.items()}
        table[f"{context}"] = row
        ratio = row["exact"] / row["amortize"]
        ratios[f"exact by amortize at {context} tokens"] = ratio
        if context in EXACT_RATIOS_MIN:
            statement = f"exact by amortize at {context} tokens [x]"
            limits.append(Limit(statement, ratio, EXACT_RATIOS_MIN[context], is_least=True))
        for name in ("none", *MODES, "cold"):
            values = cell[name]
            point = (context, statistics.median(values), min(values), max(values))
            lines.setdefault(name, []).append(point)
    figures: dict[str, Any] = {"seconds to the first token, by context": table}
    for mode in MODES:
        cell = cells.get(f"{edits_context} tokens, {mode}")
        if cell is not None:
            figures[f"{mode}, {edits_context} tokens: edits"] = {
                f"{count}": {name: values[count - 1] for name, values in cell.items()}
                for count in edits
            }
    notes = ["the request of the directive is part of the time to the first token"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    chart = Chart(
        "A turn after an edit of its second message", "tokens of context", "seconds", lines
    )
    return Report(parameters, figures, ratios, tuple(limits), tuple(notes),
                  charts=(chart,) if lines else ())  # fmt: skip
