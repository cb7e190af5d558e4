"""Lenders of a cache: agents whose rows it borrowed, so that erasing one also drops those rows.

A lender's own lenders count too, because its rows may have been computed from theirs. Lenders are
named by keyed digests, as in tombstones, because a record must not name an erased agent.
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
    """Agent that rows were borrowed from, with its epoch then; or one series of its rows.

    An agent begins a new series to revoke the rows that others borrowed before.
    """

    agent: str  # keyed digest of the agent or of its series; "": any agent of the tenant
    epoch: int

    @property
    def is_any(self) -> bool:
        """Return whether it stands for every agent of the tenant."""
        return self.agent == _ANY

    @property
    def is_sound(self) -> bool:
        """Return whether a record may contain it."""
        has_name = self.is_any or _DIGEST.fullmatch(self.agent) is not None
        return has_name and 0 <= self.epoch <= EPOCH_ERASED_MAX


# Stands for rows that were borrowed by a version which did not record the lender.
ANY_LENDER: Final = Lender(_ANY, 0)


def is_sound_series(series: str) -> bool:
    """Return whether the text is a valid name of a series."""
    return _SERIES.fullmatch(series) is not None


def merge_lenders(*groups: Iterable[Lender]) -> tuple[Lender, ...]:
    """Return each lender once, at its lowest epoch."""
    epochs: dict[str, int] = {}
    for lender in (one for group in groups for one in group):
        epochs[lender.agent] = min(lender.epoch, epochs.get(lender.agent, lender.epoch))
    return tuple(Lender(agent, epoch) for agent, epoch in sorted(epochs.items()))


def are_too_many(lenders: Iterable[Lender]) -> bool:
    """Return whether these are more than a record may have."""
    return len(tuple(lenders)) > LENDERS_MAX


def has_erased_lender(
    lenders: Iterable[Lender], epoch_of: Callable[[str], int], *, has_erasures: bool
) -> bool:
    """Return whether any lender was erased at its epoch or later.

    `has_erasures`: whether the tenant erased any agent, which counts for ANY_LENDER.
    """
    return any(
        has_erasures if lender.is_any else 0 < lender.epoch <= epoch_of(lender.agent)
        for lender in lenders
    )
