"""Construct the recall model's five attention layers."""

from __future__ import annotations

import numpy as np

from benchmarks.models.recall_layout import (
    AFTER,
    ANCHORS,
    ASSISTANT,
    BEFORE,
    BITS,
    FREQUENCIES,
    HALF,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAST_THREE,
    LINE,
    NEAR,
    NEARER,
    NO_MATCH,
    NO_MORE,
    NOTED_AT,
    OLDER,
    ONE,
    OUT,
    OWN,
    PEAK,
    PHASE,
    QUIET,
    REPLY,
    REPLY_VOTE,
    ROLE,
    SHORT,
    SLOW,
    STOP,
    STOP_AT,
    TOLD,
    UNKNOWN_AT,
    VOTE,
    Array,
    Kinds,
)

Source = slice | int


class Layer:
    """The four matrices of one attention layer."""

    def __init__(self) -> None:
        width = HEADS * HEAD_DIM
        self.q, self.k, self.v = (np.zeros((width, HIDDEN)) for _ in range(3))
        self.o = np.zeros((HIDDEN, width))
        for head in range(HEADS):
            key, value = self.k[self.rows(head)], self.v[self.rows(head)]
            key[: len(PHASE), ONE] = 1
            for anchor in ANCHORS:
                key[anchor, ONE] = value[anchor, ONE] = -8 / 7
                value[anchor - 1, ONE] = 1

    @staticmethod
    def rows(head: int) -> slice:
        """Return the rows of one head."""
        return slice(HEAD_DIM * head, HEAD_DIM * (head + 1))

    def ask(self, head: int, dims: list[int], source: Source, nats: float) -> None:
        """Add to a head's query: attention's own 1/sqrt(width) is taken back here."""
        rows = HEAD_DIM * head + np.array(dims)
        columns = np.arange(HIDDEN)[source]
        self.q[rows, columns] += nats * HEAD_DIM**0.5

    def look_back(self, head: int, distance: int, source: int, weights: Array) -> None:
        """Add a query for the key ``distance`` tokens back, as strong as ``source`` is."""
        for dim, weight in enumerate(weights):
            angle = FREQUENCIES[dim] * distance
            self.ask(head, [dim], source, weight * np.cos(angle))
            self.ask(head, [dim + HALF], source, -weight * np.sin(angle))

    def copy(self, head: int, moves: list[tuple[Source, Source, float]], group: int = 0) -> None:
        """Carry residual dimensions through one group of 64 of a head's values."""
        for index, (source, target, gain) in enumerate(moves):
            rows = np.atleast_1d(np.arange(HIDDEN)[target])
            columns = np.atleast_1d(np.arange(HIDDEN)[source])[: len(rows)]
            dims = HEAD_DIM * head + HALF * group + BITS * index + np.arange(len(rows))
            self.v[dims, columns] = 1
            self.o[rows, dims] = gain


def _look_back_over(layer: Layer, distance: int, between: list[int]) -> None:
    """Look ``distance`` tokens back, three more where the template's own tokens lie between."""
    layer.look_back(0, distance, ONE, PEAK * PHASE)
    for flag in (ASSISTANT, *between):
        layer.look_back(0, distance, flag, -PEAK * PHASE)
        layer.look_back(0, distance + 3, flag, PEAK * PHASE)
    # Those tokens themselves copy from themselves: nothing. Loud, for the flags may be set too.
    layer.look_back(0, distance, QUIET, -PEAK * PHASE)
    layer.look_back(0, 0, QUIET, 8 * PEAK * PHASE)


def gathering() -> list[Layer]:
    """Return layers 0 to 3."""
    own, one, two, four = Layer(), Layer(), Layer(), Layer()
    # An assistant opening takes the code of the token before <|im_end|> and the line end. Every
    # other token takes its own once more, which the second head takes away again.
    _look_back_over(own, 0, [])
    own.copy(0, [(OWN, OWN, 1)])
    own.look_back(1, 0, ONE, PEAK * PHASE)
    own.copy(1, [(OWN, OWN, -1)])
    # From then on an opening stands for that token, and the distances 1, 2 and 4 reach all seven.
    _look_back_over(one, 1, [])
    one.copy(0, [(OWN, BEFORE[1], 1), (ASSISTANT, AFTER, 1)])
    _look_back_over(two, 2, [AFTER])
    two.copy(0, [(OWN, BEFORE[2], 1), (BEFORE[1], BEFORE[3], 1)])
    two.copy(0, [(ASSISTANT, NEAR, 1), (AFTER, NEAR, 1)], group=1)
    _look_back_over(four, 4, [AFTER, NEAR])
    four.copy(0, [(BEFORE[0], BEFORE[4], 1), (BEFORE[1], BEFORE[5], 1)])
    four.copy(0, [(BEFORE[2], BEFORE[6], 1), (BEFORE[3], BEFORE[7], 1)], group=1)
    return [own, one, two, four]


def matching(kinds: Kinds, table: Array, full_stop: Array) -> Layer:
    """Return layer 4."""
    layer = Layer()
    at = 0
    for n in range(7):
        size, nats = (BITS, LAST_THREE) if n < 3 else (SHORT, OLDER[n - 3])
        dims = SLOW[at : at + size]
        now, then = BEFORE[n], BEFORE[n + 1]
        layer.ask(0, dims, slice(now.start, now.start + size), nats)
        layer.k[dims, then.start : then.start + size] = np.eye(size)
        at += size
    for half, weights in enumerate(NEARER):
        for dim, weight in enumerate(weights):
            layer.ask(0, [HALF * half + dim], ONE, weight)

    # Without a match attention rests on <|im_end|>, at an answer's first token on a role's opening.
    layer.ask(0, [STOP_AT], ONE, NO_MORE)
    layer.ask(0, [STOP_AT], ASSISTANT, -NO_MORE)
    layer.ask(0, [UNKNOWN_AT], ASSISTANT, NO_MATCH)
    layer.k[STOP_AT, [STOP, ASSISTANT, REPLY]] = 1, -1, -1
    # An answer's first token follows the question, never the middle of another answer.
    layer.k[STOP_AT, AFTER] = -1
    layer.k[UNKNOWN_AT, [ROLE, ASSISTANT, REPLY, LINE]] = 1, -1, -1, -1
    # After a full stop an answer's first token looks at assistant openings.
    layer.q[NOTED_AT, OWN] = TOLD * HEAD_DIM**0.5 * full_stop / BITS
    layer.ask(0, [NOTED_AT], ASSISTANT, TOLD)
    layer.ask(0, [NOTED_AT], ONE, -1.5 * TOLD)
    layer.k[NOTED_AT, ASSISTANT] = 1

    layer.copy(0, [(OUT, OUT, VOTE)])
    reply = BITS + np.arange(BITS)
    end = table[kinds.stops[0]]
    for flag, code in (
        (LINE, end),
        (ROLE, table[kinds.unknown]),
        (ASSISTANT, table[kinds.noted]),
    ):
        layer.v[reply, flag] = code
    layer.o[OUT, reply] = REPLY_VOTE * np.eye(BITS)
    return layer
