"""Draw facts, questions and filler text from a seed, to ask the recall model about."""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.models import recall_text

# Made up, so that words the tokenizer has not seen occur as often as those that it has.
SYLLABLES = ("ka", "to", "mi", "ru", "len", "bor", "sha", "vi", "qua", "zel", "dro", "oss", "yur")
MIXED = (
    "château-déjà-vu",
    "東京タワー",
    "Überraschung",
    "naïve-coöp",
    "señal número 5",
    "Ωmega-α",
    "корабль",
    "🦊🌙",
    "zażółć gęślą",
    "ἀρχή",
)


class Fact(NamedTuple):
    """One line of text; the question is its beginning, the answer its rest."""

    question: str
    answer: str

    @property
    def line(self) -> str:
        """Return the line that states it."""
        return self.question + self.answer


def _coined(draw: random.Random) -> str:
    """Return a word that was not used before."""
    return "".join(draw.choices(SYLLABLES, k=draw.randint(2, 3)))


def _value(draw: random.Random, mixed: list[str]) -> str:
    """Return what is to be remembered: one to five words, numbers or codes."""
    kinds = (
        lambda: draw.choice(recall_text.VALUES),
        lambda: draw.choice(recall_text.VALUES) + "-" + _coined(draw),
        lambda: str(draw.randint(0, 99_999)),
        lambda: f"{draw.randint(0, 99)}.{draw.randint(0, 99)}",
        lambda: _coined(draw),
        lambda: mixed.pop() if mixed else _coined(draw),
        lambda: f"{draw.getrandbits(24):06x}",
    )
    return " ".join(draw.choice(kinds)() for _ in range(draw.randint(1, 5)))


def _fact(draw: random.Random, mixed: list[str]) -> Fact:
    """Return one fact in one of the phrasings that the model's README asks for."""
    thing, aspect = draw.choice(recall_text.THINGS), draw.choice(recall_text.ASPECTS)
    known = draw.random() < 0.5
    name = draw.choice(recall_text.NAMES) if known else _coined(draw).capitalize()
    question, end = draw.choice(
        (
            (f"The {thing} {aspect} of {name} is", "."),
            (f"{name}'s {thing} {aspect} is", "."),
            (f"{thing.capitalize()} {aspect} of {name}:", ""),
            (f"What is the {thing} {aspect} of {name}? It is", "."),
            (f"What is the {thing} {aspect} of {name}?", "."),
            (f"Le {aspect} de {name} pour {thing} est", "."),
            (f"{thing}_{aspect}[{name}] =", ""),
            (f'{{"{name}": {{"{thing}_{aspect}":', "}}"),
        )
    )
    return Fact(question, f" {_value(draw, mixed)}{end}")


def facts(draw: random.Random, count: int) -> list[Fact]:
    """Return facts whose questions differ and share no word of many tokens."""
    found: dict[str, Fact] = {}
    mixed = draw.sample(MIXED, len(MIXED))
    while len(found) < count:
        new = _fact(draw, mixed)
        found.setdefault(new.question, new)
    return list(found.values())


def prose(draw: random.Random, characters: int) -> str:
    """Return lines of invented sentences, about ``characters`` long."""
    lines: list[str] = []
    size = 0
    while size < characters:
        words = draw.choices(recall_text.OTHER + recall_text.COMMON, k=draw.randint(6, 14))
        phrase = draw.choice(recall_text.PHRASES)
        line = f"{' '.join(words).capitalize()} {phrase} {draw.choice(recall_text.THINGS)}."
        lines.append(line)
        size += len(line) + 1
    return "".join(f"{line}\n" for line in lines)


def passage(draw: random.Random, words: int = 14) -> str:
    """Return words in an order that occurs nowhere else."""
    return " " + " ".join(draw.choices(recall_text.VALUES + recall_text.COMMON, k=words))
