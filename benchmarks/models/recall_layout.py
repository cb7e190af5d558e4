"""Layout of the recall model's dimensions, and the gains of its heads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LAYERS, HEADS, HEAD_DIM, HIDDEN, THETA = 5, 2, 128, 144, 1e32
HALF = HEAD_DIM // 2
POSITIONS = 32_768
MLP = 4  # it adds nothing, but llama has one
BITS, SHORT = 16, 12  # signs of a code, and how many of them the older tokens are compared by

# What each dimension of the residual stream holds. BEFORE[n] is the code of the n-th token before.
OWN = slice(0, 16)
BEFORE = (
    OWN,
    *(slice(16 * n, 16 * n + BITS) for n in (1, 2, 3)),
    *(slice(16 + 12 * n, 16 + 12 * n + SHORT) for n in (4, 5, 6, 7)),
)
OUT = slice(112, 128)
# Kinds of token, and, found by heads: an assistant opening stood one, two or three tokens back.
ASSISTANT, QUIET, STOP, ROLE, LINE, REPLY, AFTER, NEAR = range(128, 136)
ONE = 143
# So large that every token has the same RMS norm, which the norm's weights then take back.
ONE_SIZE = 4096.0
RMS = ONE_SIZE / HIDDEN**0.5

# Fast dimensions and their weights: the sharpest peak at one distance that 4-bit keys leave.
PHASE = np.array([2, 1, 0.7, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3, 0, 0, 0])
FREQUENCIES = THETA ** (-np.arange(len(PHASE)) / HALF)
# Dimensions for codes, the slowest pair of rotary dimensions first.
SLOW = [dim for pair in range(59, 11, -1) for dim in (pair, pair + HALF)]
STOP_AT, UNKNOWN_AT, NOTED_AT = 62, 62 + HALF, 61
# With -8/7 in each group of 64, the 4-bit grid is k/7: it holds 1, 0 and -1 exactly.
ANCHORS = (63, 127)

# Scores in nats. One sign of the last three tokens, then of the four before those, each far more
# than the next, so that the place wins which agrees furthest back.
LAST_THREE = 75_000.0
OLDER = (22_000.0, 1_500.0, 250.0, 60.0)
# Of two equal matches the nearer wins if it is half as far. These weights of the fast dimensions
# and of their partners are from a regression on 4-bit keys at distances from 5 to 16,000; the 0.2
# makes an exact tie of neighbours unlikely.
NEARER = 40 * np.array(
    [
        [0.2, 0.2, 0.2, 0.6, 0.7, 1, 2.2, 7, 12.5, 2.3, 0.4, 0],
        [0, 0, -0.2, 0, 0.2, 0.8, 2.2, 3.9, 14, 6.8, 2.6, 0],
    ]
)
PEAK = 400.0  # of the heads that copy
# Above the best key that differs in one of the last three tokens, below the worst that does not.
NO_MATCH = 44 * LAST_THREE
# Inside an answer four tokens must agree, for the words of an answer often stand elsewhere too.
NO_MORE = 48 * LAST_THREE + SHORT * (OLDER[0] - sum(OLDER[1:])) - 2500
# A sentence told to the assistant is acknowledged whatever it matches.
TOLD = 8 * 48 * LAST_THREE

VOTE, REPLY_VOTE = 16.0, 64.0
LOGIT = 64 / (VOTE * BITS)


class Kinds(NamedTuple):
    """Name the token ids that the model treats apart."""

    assistant: int
    roles: list[int]
    stops: list[int]  # the first is the one that it ends an answer with
    line: int
    unknown: int
    noted: int
    full_stop: int
