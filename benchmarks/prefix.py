"""Matching by characters against matching by tokens: the reused share of a sent-back history.

The same conversations are changed between turns as clients change them. By characters: the cached
tokens that the node reports. By tokens: the common prefix of the cached tokens and those of the new
prompt, as in servers that encode each prompt anew. Answers are sampled from a model with random
weights, so their tokens seldom equal the encoding of their text.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.chat_client import ChatClient, Message
from benchmarks.large_model import write_model
from benchmarks.local_fabric import LocalFabric, local_fabric
from benchmarks.prompts import text_of, user
from benchmarks.report import Limit, Report, say
from benchmarks.servers import short_folder
from benchmarks.workload import Geometry
from fabric.turn.alignment import common_prefix

DESCRIPTION = "reuse of sent-back histories: matched by characters, and by tokens"

SMALL = Geometry(64, 128, 2, 2, 1, 64, 49_152)
TURNS, QUICK_TURNS = 8, 3
MESSAGE_TOKENS = 300
ANSWER_TOKENS = 64
NODE = "node-a"
LEAST_SHARES = {"unchanged": 0.99, "stripped": 0.9}

Change = Callable[[list[Message], int], None]


def _unchanged(messages: list[Message], _: int) -> None:
    """Send everything back unchanged."""


def _stripped(messages: list[Message], _: int) -> None:
    """Strip blanks around answers, as many clients do."""
    for message in messages:
        message["content"] = message["content"].strip()


def _dated(messages: list[Message], number: int) -> None:
    """Change the time at the end of the system prompt."""
    first = messages[0]["content"].rpartition(" It is ")[0]
    messages[0]["content"] = f"{first} It is {number} o'clock."


def _thoughtless(messages: list[Message], _: int) -> None:
    """Drop the first half of the last answer, as thoughts are dropped."""
    answer = messages[-2]["content"]
    messages[-2]["content"] = answer[len(answer) // 2 :]


CHANGES: dict[str, Change] = {
    "unchanged": _unchanged,
    "stripped": _stripped,
    "the time in the system prompt": _dated,
    "answers without their first half": _thoughtless,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--turns", type=int, help=f"of each conversation (default: {TURNS})")


def run(arguments: argparse.Namespace) -> Report:
    """Hold one conversation for each change."""
    turns = arguments.turns or (QUICK_TURNS if arguments.quick else TURNS)
    table: dict[str, dict[str, float]] = {}
    with short_folder() as folder:
        model = write_model(folder / "model", SMALL)
        with local_fabric(str(model)) as fabric:
            for name, change in CHANGES.items():
                say(f"{turns} turns, {name}")
                table[name] = matched(fabric, model, name, change, turns)
    limits = tuple(
        Limit(f"{name}: share of the history that is reused", table[name]["by characters"], least,
              is_least=True)
        for name, least in LEAST_SHARES.items()
    )  # fmt: skip
    ratios = {
        name: row["by characters"] / max(row["by tokens"], 1e-9) for name, row in table.items()
    }
    parameters: dict[str, Any] = {"turns": turns, "answer tokens": ANSWER_TOKENS}
    notes = ("shares of the tokens that the agent had cached before the turn",)
    return Report(parameters, {"change": table}, ratios, limits, notes)


def matched(
    fabric: LocalFabric, model: Path, name: str, change: Change, turns: int
) -> dict[str, float]:
    """Return the shares of cached tokens that both kinds of matching reuse in later turns."""
    client: ChatClient = fabric.client()
    tokenizer = AutoTokenizer.from_pretrained(model)
    agent = name.replace(" ", "-")
    system = f"{text_of(model, MESSAGE_TOKENS, name)} It is 0 o'clock."
    messages: list[Message] = [{"role": "system", "content": system}, user("Begin.")]
    cached = by_characters = by_tokens = 0
    for number in range(turns):
        if number:
            messages.append(user(text_of(model, MESSAGE_TOKENS // 3, f"{name} {number}")))
            change(messages, number)
            before = list(fabric.agent(NODE, agent).manifest.token_ids)
            encoded = _encoded(tokenizer, messages)
            cached += len(before)
            by_tokens += common_prefix(before, encoded)
        answer = client.chat(messages, ANSWER_TOKENS, agent=agent, temperature=1.0)
        by_characters += answer.cached_tokens
        messages.append(answer.message())
    return {"by characters": by_characters / cached, "by tokens": by_tokens / cached}


def _encoded(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
