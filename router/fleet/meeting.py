"""A new router has met nobody: who names something that it has not heard of waits for the nodes.

    router starts ──▶ reads Ray's list ──▶ each node on it tells its agents, or a lease runs out

For at most a lease. Answered at once, a client of the router before would believe that its agent
is gone, and a DELETE would erase nothing. A router that is told how many nodes there are says "come
again" of what it has not heard of until as many are on Ray's list, for at most GATHER_S. A turn
cannot come again by itself: it waits for its agent's owner, but no longer than computing its prompt
anew would take (`router/turns/owner_wait.py`).
"""

import asyncio
from collections.abc import Callable, Iterable

from fabric.errors import FabricError, NotFoundError, RetryLaterError
from fabric.ports import Clock
from router.fleet.expected_nodes import ExpectedNodes, MissingNodes
from router.fleet.membership import Membership
from router.limits import LEASE_S, NAME_CHARS_TOLD

MEET_WAIT_S = LEASE_S  # after the router's start: by then, a node that is silent has no lease
MEET_POLL_S = 0.02
REPORT_WAIT_S = 10.0  # for the first list of agents of a node that serves already
AGAIN_S = 2.0
GATHER_S = 120.0  # after the router's start: Macs that `ray up` starts come in a minute or two


class Meeting:
    """Keeps requests waiting while nodes have their time to speak for the first time."""

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self._membership = membership
        self._clock = clock
        self._until_s = clock.monotonic_s() + MEET_WAIT_S
        self._gathered_s = clock.monotonic_s() + GATHER_S
        self.expected = ExpectedNodes()

    @property
    def missing(self) -> MissingNodes:
        """Expected nodes that were never on Ray's list."""
        return self.expected.missing([member.name for member in self._membership.members])

    @property
    def unmet(self) -> int:
        """How many expected nodes were never on Ray's list."""
        return self.missing.count

    def has_heard_all(self) -> bool:
        """Say whether every node that there is has told this router its agents at least once."""
        return not self.unmet and self._membership.has_heard_all()

    def is_gathering(self) -> bool:
        """Say whether nodes that were never met may still come."""
        return self.unmet > 0 and self.has_time_to_gather()

    def has_time_to_gather(self) -> bool:
        """Say whether nodes that come now are not late."""
        return self._clock.monotonic_s() < self._gathered_s

    def awaited(self) -> tuple[str, ...]:
        """Name the nodes that may soon report agents for the first time."""
        is_open = self.has_time_to_gather()
        names = [
            member.name
            for member in self._membership.members
            if member.listed is None and (is_open or self._membership.is_up(member.name))
        ]
        missing = self.missing
        return (*names, *([str(missing)] if is_open and missing.count else []))

    def may_learn_agents(self) -> bool:
        """Say whether a node is about to report its agents, or an awaited one may soon join."""
        return bool(self.awaited()) or self.is_reporting()

    def is_reporting(self) -> bool:
        """Say whether a node that serves is about to report its agents for the first time."""
        serving = [m for m in self._membership.members if m.view and self._membership.is_up(m.name)]
        return any(member.listed is None for member in serving)

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

    async def agents(self) -> None:
        """Wait until every node on Ray's list has reported its agents, or a lease has passed."""
        await self.wait(self._membership.settled)

    async def owner(self, is_known: Callable[[], bool], patience_s: float) -> bool:
        """Wait until a node reports what `is_known` asks for; return whether one did.

        The wait ends after `patience_s`, and as soon as no further node is awaited. A node that
        serves already reports within moments, so its report is always waited for.
        """
        now_s = self._clock.monotonic_s()
        until_s, reported_s = now_s + patience_s, now_s + REPORT_WAIT_S
        while not is_known():
            now_s = self._clock.monotonic_s()
            is_due = now_s < until_s and self.awaited()
            if not is_due and not (now_s < reported_s and self.is_reporting()):
                return False
            await asyncio.sleep(MEET_POLL_S)
        return True

    def _is_member(self, name: str) -> bool:
        return any(member.name == name for member in self._membership.members)

    def require_nodes(self) -> None:
        """Raise RetryLaterError while nobody can say which nodes there are."""
        if not self._membership.members:
            raise _nobody_met()

    def require_reports(self, agent: str) -> None:
        """Raise RetryLaterError while a node that may have this agent has not reported."""
        if self.may_learn_agents():
            raise _agents_unknown(agent, self.awaited() or ("a node that has just joined",))

    def unknown_agent(self, agent: str) -> FabricError:
        """Return the error for an agent that no node has reported."""
        missing: list[str] = [*self._membership.unheard()]
        if self.is_gathering():
            missing.append(self._told_unmet())
        if missing or not self._membership.members:
            return _agents_unknown(agent, missing or ["the nodes"])
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
        missing = self.missing
        names = f" ({missing})" if missing.names else ""
        return f"{missing.count} of {self.expected.total} nodes{names}"


def _agents_unknown(agent: str, missing: Iterable[str]) -> RetryLaterError:
    names = ", ".join(missing)
    message = f"no node that has told its agents knows {agent!r}; not heard yet: {names}"
    return RetryLaterError(message, retry_after_s=AGAIN_S, code="agents_unknown")


def no_such_agent(agent: str) -> NotFoundError:
    """Return what to say of an agent that no node has."""
    message = f"no agent is called {agent!r}"
    return NotFoundError(message, code="unknown_agent")


def _nobody_met() -> RetryLaterError:
    message = "this router has not met any node yet"
    return RetryLaterError(message, retry_after_s=AGAIN_S, code="no_node_ready")
