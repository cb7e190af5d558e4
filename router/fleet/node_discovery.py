"""Waits of a new router for nodes that have not reported yet.

    router starts ──▶ reads Ray's list ──▶ every node on it reports its agents, or a lease passes

Requests wait for at most a lease. Without the wait, a client of the previous router would get 404
for its agent, and a DELETE would erase nothing. A router that expects a number of nodes answers
"try again" for unknown agents until as many have joined, for at most GATHER_S. A turn cannot be
retried that way: it waits for its agent's owner, but no longer than recomputing its prompt would
take (`router/turns/owner_wait.py`).
"""

import asyncio
from collections.abc import Callable, Iterable

from fabric.errors import FabricError, NotFoundError, RetryLaterError
from fabric.ids import NodeName
from fabric.ports import Clock
from router.fleet.expected_nodes import ExpectedNodes, MissingNodes
from router.fleet.membership import Membership
from router.limits import LEASE_S, QUOTED_NAME_CHARS_MAX

DISCOVERY_WAIT_S = LEASE_S  # after the router's start: by then, a silent node has no lease
DISCOVERY_POLL_S = 0.02
REPORT_WAIT_S = 10.0  # for the first list of agents of a node that serves already
AGAIN_S = 2.0
GATHER_S = 120.0  # after the router's start: Macs that `ray up` starts join in a minute or two


class NodeDiscovery:
    """Nodes that a router still waits for, and the errors for what it cannot find."""

    def __init__(self, membership: Membership, clock: Clock, expected: ExpectedNodes) -> None:
        self._membership = membership
        self._clock = clock
        self._until_s = clock.monotonic_s() + DISCOVERY_WAIT_S
        self._gathered_s = clock.monotonic_s() + GATHER_S
        self.expected = expected
        self._missing: tuple[object, MissingNodes] = (None, MissingNodes())

    @property
    def missing(self) -> MissingNodes:
        """Expected nodes that were never on Ray's list."""
        members, expected = self._membership.members, self.expected
        names = expected.names, expected.remembered, expected.drained
        state = members, expected.count, expected.is_fewer, names
        if self._missing[0] != state:
            self._missing = state, expected.missing({member.name for member in members})
        return self._missing[1]

    @property
    def missing_count(self) -> int:
        """Number of expected nodes that were never on Ray's list."""
        return self.missing.count

    def has_all_reports(self) -> bool:
        """Return whether every existing node has reported its agents to this router."""
        return not self.missing_count and self._membership.has_all_reports()

    def is_gathering(self) -> bool:
        """Return whether expected nodes that never joined may still join."""
        return self.missing_count > 0 and self.has_time_to_gather()

    def has_time_to_gather(self) -> bool:
        """Return whether the time for nodes to join has not passed."""
        return self._clock.monotonic_s() < self._gathered_s

    def awaited_nodes(self) -> tuple[str, ...]:
        """Return the nodes that may soon report agents for the first time."""
        is_open = self.has_time_to_gather()
        names = [
            name
            for name in self._membership.unreported_nodes()
            if is_open or self._membership.is_up(name)
        ]
        missing = self.missing
        return (*names, *([str(missing)] if is_open and missing.count else []))

    def may_learn_agents(self) -> bool:
        """Return whether a node is about to report its agents, or an awaited one may join."""
        return bool(self.awaited_nodes()) or self.is_reporting()

    def is_reporting(self) -> bool:
        """Return whether a serving node is about to report its agents for the first time."""
        unreported = map(self._membership.find, self._membership.unreported_nodes())
        return any(m and m.view and self._membership.is_up(m.name) for m in unreported)

    async def wait(self, is_known: Callable[[], bool], patience_s: float = 0.0) -> None:
        """Wait until `is_known`, or until the router has run for DISCOVERY_WAIT_S.

        The wait lasts at least `patience_s` if `is_known` stays false.
        """
        until_s = max(self._until_s, self._clock.monotonic_s() + patience_s)
        # No event to wait for: a lease also runs out by the clock alone.
        while not is_known() and self._clock.monotonic_s() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(DISCOVERY_POLL_S)

    async def wait_for_node(self, name: str) -> None:
        """Wait until `name` is known, or every node was contacted."""
        await self.wait(lambda: self._membership.has_contacted_all() or self._is_member(name))

    async def wait_for_roster(self) -> None:
        """Wait until Ray's list was read once."""
        await self.wait(lambda: self._membership.has_roster)

    async def wait_for_reports(self) -> None:
        """Wait until every node on Ray's list has reported its agents, or a lease has passed."""
        await self.wait(self._membership.is_settled)

    async def wait_for_owner(self, is_known: Callable[[], bool], patience_s: float) -> bool:
        """Wait until a report makes `is_known` true; return whether one did.

        The wait ends after `patience_s`, and as soon as no further node is awaited. A node that
        serves already reports within moments, so its report is always waited for.
        """
        now_s = self._clock.monotonic_s()
        until_s, reported_s = now_s + patience_s, now_s + REPORT_WAIT_S
        while not is_known():
            now_s = self._clock.monotonic_s()
            is_due = now_s < until_s and self.awaited_nodes()
            if not is_due and not (now_s < reported_s and self.is_reporting()):
                return False
            await asyncio.sleep(DISCOVERY_POLL_S)
        return True

    async def models(self) -> list[str]:
        """Return the models, after every node had time to report its own."""
        await self.wait(self._membership.has_contacted_all)
        return self._membership.models()

    async def require_model(self, model: str) -> None:
        """Raise NotFoundError or RetryLaterError if no node serves `model`.

        Waits for the nodes first: the clients of a router that died reconnect at once, and must not
        get 404 for their model.
        """
        membership = self._membership
        await self.wait(lambda: model in membership.models() or membership.has_contacted_all())
        names = membership.models()
        if not names:
            message = "no node is ready yet"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        if model not in names:
            shown = model[:QUOTED_NAME_CHARS_MAX]
            if self.is_gathering():
                message = f"no node serves {shown!r} so far; {self.missing_count} are still missing"
                raise RetryLaterError(message, retry_after_s=AGAIN_S, code="nodes_unknown")
            message = f"model {shown!r} is not served here; available: {', '.join(names)}"
            raise NotFoundError(message, code="model_not_found", param="model")

    def _is_member(self, name: str) -> bool:
        return self._membership.find(NodeName(name)) is not None

    def require_nodes(self) -> None:
        """Raise RetryLaterError while no node is known."""
        if not self._membership.members:
            raise _no_nodes()

    def require_reports(self, agent: str) -> None:
        """Raise RetryLaterError while a node that may have this agent has not reported."""
        if self.may_learn_agents():
            raise _agents_unknown(agent, self.awaited_nodes() or ("a node that has just joined",))

    def unknown_agent(self, agent: str) -> FabricError:
        """Return the error for an agent that no node has reported."""
        missing: list[str] = [*self._membership.unreported_nodes()]
        if self.is_gathering():
            missing.append(self._missing_text())
        if missing or not self._membership.members:
            return _agents_unknown(agent, missing or ["the nodes"])
        return no_such_agent(agent)

    def unknown_node(self, name: str, param: str) -> FabricError:
        """Return the error for a node name that is not known."""
        names = [member.name for member in self._membership.members]
        if not names:
            return _no_nodes()
        shown = name[:QUOTED_NAME_CHARS_MAX]
        if self.is_gathering():
            message = f"no node is called {shown!r} so far; still missing: {self._missing_text()}"
            return RetryLaterError(message, retry_after_s=AGAIN_S, code="nodes_unknown")
        message = f"no node is called {shown!r}; known: {', '.join(names)}"
        return NotFoundError(message, code="unknown_node", param=param)

    def _missing_text(self) -> str:
        missing = self.missing
        names = f" ({missing})" if missing.names else ""
        return f"{missing.count} of {self.expected.total} nodes{names}"


def no_such_agent(agent: str) -> NotFoundError:
    """Return the error for an agent that does not exist."""
    message = f"no agent is called {agent!r}"
    return NotFoundError(message, code="unknown_agent")


def _agents_unknown(agent: str, missing: Iterable[str]) -> RetryLaterError:
    names = ", ".join(missing)
    message = f"no node has reported agent {agent!r} so far; still waiting for: {names}"
    return RetryLaterError(message, retry_after_s=AGAIN_S, code="agents_unknown")


def _no_nodes() -> RetryLaterError:
    message = "this router has not found any node yet"
    return RetryLaterError(message, retry_after_s=AGAIN_S, code="no_node_ready")
