"""The agents whose rows a cache borrowed, so that an erasure of one reaches what came of them.

A lender's own lenders count, too: its rows may have been computed from theirs. They are named by
keyed digests, as in tombstones, because a record must not name an agent that is erased.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from fabric.limits import EPOCH_ERASED_MAX, LENDERS_MAX

_DIGEST: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SERIES: Final = re.compile(r"[0-9]{1,16}\.[0-9]{1,16}", re.ASCII)
_ANY: Final = ""


@dataclass(frozen=True, slots=True)
class Lender:
    """An agent that rows were borrowed from, at the epoch it had then; or a series of its rows.

    An agent begins a new series whenever others must not keep what they borrowed of it before.
    """

    agent: str  # a keyed digest of it, or of its series; or nothing: any agent of the tenant
    epoch: int

    @property
    def is_any(self) -> bool:
        """Return whether it stands for every agent of the tenant."""
        return self.agent == _ANY

    @property
    def is_sound(self) -> bool:
        """Return whether it may be part of a record."""
        has_name = self.is_any or _DIGEST.fullmatch(self.agent) is not None
        return has_name and 0 <= self.epoch <= EPOCH_ERASED_MAX


# Rows were borrowed by a version that did not note of whom.
ANY_LENDER: Final = Lender(_ANY, 0)


def is_sound_series(series: str) -> bool:
    """Return whether a record may name its series so."""
    return _SERIES.fullmatch(series) is not None


def merge_lenders(*groups: Iterable[Lender]) -> tuple[Lender, ...]:
    """Return each lender once, at its lowest epoch."""
    epochs: dict[str, int] = {}
    for lender in (one for group in groups for one in group):
        epochs[lender.agent] = min(lender.epoch, epochs.get(lender.agent, lender.epoch))
    return tuple(Lender(agent, epoch) for agent, epoch in sorted(epochs.items()))


def are_too_many(lenders: Iterable[Lender]) -> bool:
    """Return whether a record has no place for so many."""
    return len(tuple(lenders)) > LENDERS_MAX


def has_erased_lender(
    lenders: Iterable[Lender], epoch_of: Callable[[str], int], *, has_erasures: bool
) -> bool:
    """Return whether any lender is erased; `has_erasures` of the tenant counts for any agent.

    A lower epoch of one lender is what counts: an erasure reaches all rows up to its own.
    """
    return any(
        has_erasures if lender.is_any else 0 < lender.epoch <= epoch_of(lender.agent)
        for lender in lenders
    )
