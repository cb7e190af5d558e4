"""A new router has met nobody: who names something that it has not heard of waits for the nodes.

    router starts ──▶ reads Ray's list ──▶ each node on it tells its agents, or a lease runs out

For at most a lease. Answered at once, a client of the router before would believe that its agent
is gone, and a DELETE would erase nothing. A router that is told how many nodes there are says "come
again" of what it has not heard of until as many are on Ray's list, for at most GATHER_S.
"""

import asyncio
from collections.abc import Callable

from fabric.errors import FabricError, NotFoundError, RetryLaterError
from fabric.limits import LEASE_S, NAME_CHARS_TOLD
from fabric.ports import Clock
from router.fleet.membership import Membership

MEET_WAIT_S = LEASE_S  # after the router's start: by then, a node that is silent has no lease
MEET_POLL_S = 0.02
LATE_WAIT_S = 10.0  # for nodes that came later, e.g. still load, where nobody knows an agent
AGAIN_S = 2.0
GATHER_S = 120.0  # after the router's start: Macs that `ray up` starts come in a minute or two


class Meeting:
    """Keeps requests waiting while nodes have their time to speak for the first time."""

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self._membership = membership
        self._clock = clock
        self._until_s = clock.monotonic_s() + MEET_WAIT_S
        self._gathered_s = clock.monotonic_s() + GATHER_S
        self.expected = 0  # nodes of this fabric; 0: nobody has said how many

    @property
    def unmet(self) -> int:
        """How many nodes are to come that were never on Ray's list."""
        return max(0, self.expected - len(self._membership.members))

    def has_heard_all(self) -> bool:
        """Say whether every node that there is has told this router its agents at least once."""
        return not self.unmet and self._membership.has_heard_all()

    def is_gathering(self) -> bool:
        """Say whether nodes that were never met may still come."""
        return self.unmet > 0 and self._clock.monotonic_s() < self._gathered_s

    async def wait(self, is_known: Callable[[], bool], patience_s: float = 0.0) -> None:
        """Return once `is_known`, or as soon as this router is no new one any more.

        But not before `patience_s` are over.
        """
        until_s = max(self._until_s, self._clock.monotonic_s() + patience_s)
        # No event to wait for: a lease also runs out by the clock alone.
        while not is_known() and self._clock.monotonic_s() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(MEET_POLL_S)

    async def node(self, name: str) -> None:
        await self.wait(lambda: self._membership.has_met_all() or self._is_member(name))

    async def roster(self) -> None:
        await self.wait(lambda: self._membership.has_roster)

    async def agents(self, is_known: Callable[[], bool] = lambda: True) -> None:
        """Wait until every node has told its agents, or has had its time to do so.

        Where nobody knows the agent even then, nodes that came later have theirs.
        """
        await self.wait(self._membership.settled)
        if not is_known():
            await self.wait(self._membership.settled, LATE_WAIT_S)

    def _is_member(self, name: str) -> bool:
        return any(member.name == name for member in self._membership.members)

    def require_nodes(self) -> None:
        """Raise RetryLaterError while nobody can say which nodes there are."""
        if not self._membership.members:
            raise _nobody_met()

    def unknown_agent(self, agent: str) -> FabricError:
        """Return what to say of an agent of whom no node has told."""
        missing: list[str] = [*self._membership.unheard()]
        if self.is_gathering():
            missing.append(self._told_unmet())
        if missing or not self._membership.members:
            who = ", ".join(missing) or "the nodes"
            message = f"no node that has told its agents knows {agent!r}; not heard yet: {who}"
            return RetryLaterError(message, retry_after_s=AGAIN_S, code="agents_unknown")
        return no_such_agent(agent)

    def unknown_node(self, name: str, param: str) -> FabricError:
        names = [member.name for member in self._membership.members]
        if not names:
            return _nobody_met()
        if self.is_gathering():
            told = name[:NAME_CHARS_TOLD]
            message = f"no node that has come is called {told!r}; not there yet: "
            text = message + self._told_unmet()
            return RetryLaterError(text, retry_after_s=AGAIN_S, code="nodes_unknown")
        message = f"no node is called {name[:NAME_CHARS_TOLD]!r}; known: {', '.join(names)}"
        return NotFoundError(message, code="unknown_node", param=param)

    def _told_unmet(self) -> str:
        return f"{self.unmet} of {self.expected} nodes"


def no_such_agent(agent: str) -> NotFoundError:
    """Return what to say of an agent that no node has."""
    message = f"no agent is called {agent!r}"
    return NotFoundError(message, code="unknown_agent")


def _nobody_met() -> RetryLaterError:
    message = "this router has not met any node yet"
    return RetryLaterError(message, retry_after_s=AGAIN_S, code="no_node_ready")
