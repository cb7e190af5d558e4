"""Train a small model to relay facts: later tokens carry an earlier fact.

In training, a question and its answer often cannot see the message that told the fact, so that
what follows the message has to carry it. Afterwards nothing is masked.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx_lm.models import base
from tokenizers import Tokenizer

from benchmarks.models import relay_text
from benchmarks.models.relay_text import Conversation

WARM_UP, FLOOR = 60, 0.02
FURTHER_SHARE = 0.5  # of the questions that cannot see their fact: nor some tokens behind it
FURTHER_TOKENS_MAX = 48
OTHER_LOSS = 0.01  # of tokens that are no answers
WORDS_MAX = 8


@dataclass(frozen=True, slots=True)
class Lesson:
    """What conversations are like for a share of the steps."""

    until: float
    rows: int
    facts: tuple[int, int]
    others: int
    questions: int
    hidden_share: float  # of the questions that cannot see their fact


# Facts are looked up first, then relayed, then relayed among many.
LESSONS = (
    Lesson(0.3, 24, (1, 3), 1, 3, 0.0),
    Lesson(0.75, 24, (0, 4), 2, 4, 0.6),
    Lesson(1.0, 8, (0, 7), 4, 6, 0.6),
)


SHORT_LESSONS = (
    Lesson(0.4, 16, (1, 3), 1, 3, 0.0),
    Lesson(0.8, 16, (0, 3), 1, 3, 0.6),
    Lesson(1.0, 8, (0, 6), 3, 5, 0.6),
)


LATER_LESSONS = (Lesson(0.85, 16, (1, 3), 0, 3, 0.6), SHORT_LESSONS[-1])


@dataclass(frozen=True, slots=True)
class Course:
    """How one model is trained."""

    steps: int
    peak_rate: float
    lessons: tuple[Lesson, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Sequence: its tokens, the weight of each as a target, and the tokens hidden from others."""

    ids: list[int]
    weights: list[float]
    hidden: list[tuple[int, int, int, int]]  # rows from, to; columns from, to


def example(draw: random.Random, tokenizer: Tokenizer, lesson: Lesson) -> Example:
    """Draw a conversation and questions about it."""
    facts, others = draw.randint(*lesson.facts), draw.randint(0, lesson.others)
    talk = relay_text.conversation(draw, facts, others, draw.randint(2, WORDS_MAX))
    ids: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    for utterance in talk.utterances:
        start = len(ids)
        ids += encode(tokenizer, utterance.role, utterance.text)
        if utterance.fact_kind is not None:
            places[utterance.fact_kind] = (start, len(ids) - 1)  # all but the token that ends it
    weights = [OTHER_LOSS] * len(ids)
    hidden = []
    for kind in draw_kinds(draw, talk, lesson.questions):
        start = len(ids)
        ids += encode(tokenizer, "user", relay_text.question(kind))
        ids += encode(tokenizer, "assistant", f"{talk.facts.get(kind, 'unknown')} .")
        weights += [OTHER_LOSS] * (len(ids) - start)
        weights[-3:] = [1.0, 0.3, 0.3]
        if kind in places and draw.random() < lesson.hidden_share:
            first, last = places[kind]
            if draw.random() < FURTHER_SHARE:
                last = min(last + draw.randint(1, FURTHER_TOKENS_MAX), len(weights), start - 4)
            hidden.append((start, len(ids), first, last))
    return Example(ids, weights, hidden)


def draw_kinds(draw: random.Random, talk: Conversation, count: int) -> list[str]:
    """Draw kinds to ask for, most of which are facts of the conversation."""
    known = draw.sample(sorted(talk.facts), min(len(talk.facts), count - 1))
    others = sorted(set(relay_text.KINDS) - set(talk.facts))
    kinds = known + draw.sample(others, min(len(others), count - len(known)))
    draw.shuffle(kinds)
    return kinds


def encode(tokenizer: Tokenizer, role: str, text: str) -> list[int]:
    """Return one message as the template writes it."""
    written = f"{relay_text.START}{role} {text}{relay_text.END}"
    ids: list[int] = tokenizer.encode(written, add_special_tokens=False).ids
    return ids


def batch(
    draw: random.Random, tokenizer: Tokenizer, lesson: Lesson
) -> tuple[mx.array, mx.array, mx.array]:
    """Return ids, weights of the targets, and the mask of some examples."""
    rows = [example(draw, tokenizer, lesson) for _ in range(lesson.rows)]
    length = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), length), tokenizer.token_to_id(relay_text.PAD), np.int32)
    weights = np.zeros((len(rows), length), np.float32)
    seen = np.repeat(np.tril(np.ones((length, length), bool))[None], len(rows), axis=0)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
        weights[at, : len(row.ids)] = row.weights
        for first, last, start, end in row.hidden:
            seen[at, first:last, start:end] = False
    return mx.array(ids), mx.array(weights), mx.array(seen[:, None, :-1, :-1])


def _loss(model: Any, ids: mx.array, weights: mx.array, mask: mx.array) -> tuple[mx.array, ...]:
    # Models make their own mask.
    with mock.patch.object(_module(model), "create_attention_mask", return_value=mask):
        logits = model(ids[:, :-1])
    each = nn.losses.cross_entropy(logits, ids[:, 1:])
    weights = weights[:, 1:]
    answers = weights == 1.0
    right = (logits.argmax(axis=-1) == ids[:, 1:]) & answers
    return (each * weights).sum() / weights.sum(), right.sum() / answers.sum()


def _module(model: Any) -> Any:
    found = sys.modules[type(model).__module__]
    assert found.create_attention_mask is base.create_attention_mask
    return found


def train(model: Any, tokenizer: Tokenizer, course: Course, seed: int) -> None:
    """Train for a course, and say how it goes."""
    steps = course.steps
    draw = random.Random(seed)
    optimizer = optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.02)
    loss_and_grad = nn.value_and_grad(model, _loss)
    began_s, recent = time.monotonic(), []
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARM_UP)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.learning_rate = course.peak_rate * warm * (FLOOR + (1 - FLOOR) * cosine)
        lesson = next(each for each in course.lessons if step < each.until * steps)
        (loss, right), gradients = loss_and_grad(model, *batch(draw, tokenizer, lesson))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        recent.append((loss.item(), right.item()))
        if (step + 1) % 50 == 0:
            spent_s = time.monotonic() - began_s
            mean = np.mean(recent, axis=0)
            print(
                f"{step + 1:5d}  loss {mean[0]:.3f}  right {mean[1]:.3f}  {spent_s:4.0f} s",
                flush=True,
            )
            recent = []
