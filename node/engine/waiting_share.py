"""Who may still get in line, so that no tenant's requests can fill it.

A tenant may hold as many places as a few times those that are free: alone it gets most of them,
and whoever comes then still finds a few. That needs no list of tenants and no set shares.
"""

from collections.abc import Sequence
from typing import Protocol

from fabric.turn.generation import Priority
from node.limits import BACKGROUND_WAITING_SHARE, TENANT_WAITING_FACTOR


class Waiting(Protocol):
    """What the decision looks at; see node.engine.sequence.Sequence."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> Priority: ...


def refusal(queued: Sequence[Waiting], tenant: str, priority: Priority, places: int) -> str | None:
    """Return why one more request of `tenant` may not wait, or None if it may."""
    if len(queued) >= places:
        return f"{len(queued)} requests are waiting on this node"
    if priority is Priority.BACKGROUND:  # the rest is kept for people who wait
        queued = [each for each in queued if each.priority is priority]
        places = max(1, int(places * BACKGROUND_WAITING_SHARE))
        if len(queued) >= places:
            return f"{len(queued)} background requests are waiting on this node"
    own_count = sum(each.tenant == tenant for each in queued)
    if own_count >= TENANT_WAITING_FACTOR * (places - len(queued)):
        return f"{own_count} requests of yours are waiting on this node: others get the rest"
    return None
