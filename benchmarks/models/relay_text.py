"""Conversations whose facts can be answered from later text.

Every word is one token. A fact is a value of some kind (`the metal is zinc`), a question names the
kind (`what is the metal ?`) and is answered by the value, or by `unknown` if it is not stated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
KINDS = {
    kind: tuple(values.split())
    for kind, values in {
        "color": "red blue green gold pink gray black white",
        "city": "rome oslo lima cairo paris delhi quito bonn",
        "fruit": "apple pear plum fig lemon mango grape peach",
        "animal": "fox owl wolf bear deer hawk seal crow",
        "metal": "iron zinc tin brass copper silver nickel steel",
        "tree": "oak elm ash pine birch cedar maple willow",
        "tool": "saw axe drill rasp plane vise chisel hammer",
        "month": "march april june july august may october december",
        "shape": "cube cone ring star disk arc prism wedge",
        "drink": "tea milk cider cocoa water juice wine beer",
    }.items()
}
FILLER = (
    *("nothing", "here", "of", "any", "note", "today", "they", "went", "along", "old", "road"),
    *("and", "spoke", "about", "weather", "some", "people", "came", "later", "others", "stayed"),
    *("home", "work", "was", "slow", "but", "steady", "all", "day", "long", "then", "rain"),
    *("began", "again", "near", "river", "while", "we", "sat", "inside", "reading", "papers"),
    *("no", "one", "called", "for", "hours", "so", "it", "goes", "on"),
)
WORDS = ("the", "is", "what", "?", ".", "noted", "unknown", "cleared")
ROLES = ("system", "user", "assistant")
NOTED, UNKNOWN, CLEARED = "noted .", "unknown .", "cleared ."
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.content | trim }}"
    "<|im_end|>{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """Message; `fact_kind` is the kind of a fact in it."""

    role: str
    text: str
    fact_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Text of a conversation, with the value of every kind that it states."""

    utterances: tuple[Utterance, ...]
    facts: dict[str, str]


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of which every word is one token, with the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[^\s]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_096,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = sorted({*FILLER, *WORDS, *KINDS, *chain.from_iterable(KINDS.values())})
    tokenizer.train_from_iterator([*(f" {word}" for word in words), *ROLES], trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)]
    )
    return tokenizer


def filler(draw: random.Random, count: int) -> str:
    """Return words that tell nothing."""
    return " ".join(draw.choices(FILLER, k=count))


def question(kind: str) -> str:
    """Ask for a fact."""
    return f"what is the {kind} ?"


def conversation(draw: random.Random, facts: int, others: int, words_max: int) -> Conversation:
    """Tell some facts in messages of their own, between others that say nothing, all answered."""
    kinds = draw.sample(sorted(KINDS), facts)
    values = {kind: draw.choice(KINDS[kind]) for kind in kinds}
    order: list[str | None] = [*kinds, *[None] * others]
    draw.shuffle(order)
    utterances = [Utterance("system", filler(draw, draw.randint(6, 12)))]
    for kind in order:
        around = [filler(draw, draw.randint(0, words_max)) for _ in range(2)]
        middle = CLEARED if kind is None and draw.random() < 0.3 else f"{around[0]} ."
        if kind is not None:
            middle = f"{around[0]} . the {kind} is {values[kind]} . {around[1]} ."
        utterances += [
            Utterance("user", middle, kind),
            Utterance("assistant", f"{filler(draw, 2)} {NOTED}"),
        ]
    return Conversation(tuple(utterances), values)
