"""Heartbeats to every node, and leases by the router's monotonic clock.

     heartbeat answered        silent SUSPECT_S         silent LEASE_S
    ────────●───────── alive ────────●───── suspect ─────────●──── expired ───▶
    ──── answered `asleep` ──────────────────────────────────────── expired ───▶

A lease counts from when its heartbeat was sent, so a slow answer never extends it. A node that was
away catches up first: it gets the tombstones of what was erased meanwhile.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from fabric.control.calls import UNKNOWN_CALL
from fabric.control.change_calls import OTHER_COLUMNS, DescribeChanges, ViewChanges
from fabric.control.node_calls import ASLEEP, AgentList, Describe, NodeView
from fabric.control.versions import BAD_NODE_ANSWER, check_versions, version_mismatch_message
from fabric.errors import FabricError, RejectedError, RetryLaterError, StartFailedError
from fabric.ids import NodeName
from fabric.limits import HEARTBEAT_S
from fabric.ports import Clock
from router.fleet.agent_lists import AgentReports, free_in_steps, read_list
from router.fleet.node_client import ControlTransport, NodeLink
from router.fleet.stall_watch import StallWatch
from router.limits import HEARTBEATS_AT_ONCE_MAX, LEASE_S, SUSPECT_S, WHOLE_LIST_S

_LOG = logging.getLogger("macfabric.router.membership")
PULSE_TIMEOUT_S = 600.0  # of a heartbeat while the router stalls again and again

NodeNames = Callable[[], tuple[NodeName, ...]]
Roster = Callable[[], Awaitable[Mapping[NodeName, ControlTransport]]]
LinkFactory = Callable[[NodeName, ControlTransport, Callable[[], bool]], NodeLink]


class CatchUp(Protocol):
    """Update of a node that joins or returns, before its lease begins."""

    def is_caught_up(self, view: NodeView) -> bool:
        """Return whether a node that was not away is up to date."""
        ...

    async def catch_up(
        self, link: NodeLink, view: NodeView, others: NodeNames, *, is_present: bool
    ) -> None:
        """Bring a node up to date; raise FabricError if it must not serve yet.

        `others` returns the names of all known nodes; a present node has a lease.
        """
        ...


class LeaseState(StrEnum):
    """State of a node's lease."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Reason why a node did not start, or cannot be used, and when it starts again."""

    message: str
    again_s: float | None = None  # by the router's clock; None: it does not retry


@dataclass(slots=True)
class Member:
    """Node of the roster: its link, its last state, and when that was requested."""

    name: NodeName
    link: NodeLink
    heartbeat_s: float  # when the last answered heartbeat was sent
    view: NodeView | None = None
    listed: tuple[int, int] | None = None  # incarnation and changes of the last agent list
    whole_s: float = -math.inf  # when the last whole list was requested
    loading_s: float | None = None  # when it last reported that it is starting
    failure: StartFailure | None = None  # why it could not start, by its last answer
    supports_changes: bool = True  # it supports `DescribeChanges`
    supports_rows: bool = True  # it supports `ListChanges`
    known: tuple[int, int] = (0, 0)  # numbers of `view` and of its links, given by the node
    was_expired: bool = False  # at the last check
    was_settled: bool = False  # at the last check; until it is silent, only an answer changes it
    pulse: asyncio.Task[None] | None = field(default=None, repr=False)
    listing: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_asleep(self) -> bool:
        """Return whether it last reported that its machine goes to sleep."""
        return self.view is not None and self.view.state == ASLEEP

    @property
    def state(self) -> tuple[int, int] | None:
        """Incarnation and change counter in the last heartbeat."""
        return None if self.view is None else (self.view.incarnation, self.view.changes)


async def _read_view(member: Member, timeout_s: float) -> tuple[NodeView, tuple[int, int]]:
    """Return a node's state and the numbers that it gave it; raise FabricError."""
    if member.supports_changes:
        last_view, (view, links) = member.view, member.known
        incarnation = last_view.incarnation if last_view is not None else 0
        call = DescribeChanges(incarnation, view, links) if view else DescribeChanges()
        try:
            changes = await member.link.call(call, ViewChanges, timeout_s)
        except RejectedError as error:
            if error.code != UNKNOWN_CALL:
                raise
            member.supports_changes = False  # an older node
        else:
            return _apply_changes(member, changes, last_view), (changes.view, changes.links)
    whole = await member.link.call(Describe(), NodeView, timeout_s)
    check_versions(member.name, {"control": whole.control, "control_min": whole.control_min})
    return whole, (0, 0)


def _apply_changes(member: Member, changes: ViewChanges, known: NodeView | None) -> NodeView:
    is_same_life = known is not None and changes.incarnation == known.incarnation
    try:
        check_versions(member.name, changes.fields)
        return changes.apply_to(known if is_same_life else None)
    except RejectedError as error:
        member.known = (0, 0)  # the next heartbeat requests all
        message = f"{member.name} sent invalid changes: {error.message}"
        raise FabricError(message, code=BAD_NODE_ANSWER) from None


async def _read_list(member: Member, known: tuple[int, int]) -> AgentList:
    if member.supports_changes and member.supports_rows:
        try:
            return await read_list(member.link, known, in_rows=True)
        except RejectedError as error:
            if error.code not in {UNKNOWN_CALL, OTHER_COLUMNS}:
                raise
            member.supports_rows = False
    return await read_list(member.link, known)


class Membership:
    """Known nodes and their leases."""

    def __init__(
        self,
        roster: Roster,
        connect: LinkFactory,
        clock: Clock,
        reports: AgentReports,
        *,
        catch_up: CatchUp | None = None,
        watch: Callable[[Member, str], None] = lambda *_: None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Start with no node; `watch` is called with each node and its state, changed or not."""
        self.heartbeat_s = heartbeat_s
        self.expired_count = 0  # leases that ran out
        self._catch_up = catch_up
        self._watch = watch
        self._roster = roster
        self._connect = connect
        self._clock = clock
        self._reports = reports
        self._members: dict[NodeName, Member] = {}
        self._sorted: tuple[Member, ...] = ()
        self._unlisted: set[NodeName] = set()  # have never reported their agents
        self._unanswered: set[NodeName] = set()  # have never answered
        self._by_model: dict[str, dict[NodeName, None]] = {}
        self._scouting: asyncio.Task[None] | None = None
        self._stalls = StallWatch(clock, self._forgive_stall)
        self.has_roster = False  # whether it was read at least once
        self._reports_since_s = -math.inf  # earlier lists do not count as reports
        self.lists_count = 0  # new versions of nodes' lists of agents

    @property
    def members(self) -> tuple[Member, ...]:
        """All nodes ever seen by this router, by name."""
        return self._sorted

    def models(self) -> list[str]:
        """Return the names of the models that unexpired nodes serve, sorted."""
        return sorted(
            model for model, names in self._by_model.items() if any(map(self.is_up, names))
        )

    def find(self, name: NodeName) -> Member | None:
        return self._members.get(name)

    def health(self, name: NodeName) -> LeaseState:
        """Return the state of a node's lease; that of an unknown node is expired."""
        member = self._members.get(name)
        self._stalls.check_lateness()
        silent_s = self._silent_s(member)
        if silent_s >= LEASE_S:
            return LeaseState.EXPIRED
        return LeaseState.SUSPECT if silent_s >= SUSPECT_S else LeaseState.ALIVE

    def state_of(self, member: Member, health: LeaseState | None = None) -> str:
        """Return a node's state: the one it reports, or that of its lease if it is not alive."""
        health = health or self.health(member.name)
        if member.failure is not None:
            return "failed"
        if member.is_asleep:
            return ASLEEP
        if health is not LeaseState.ALIVE:
            return health.value
        return member.view.state if member.view else "joining"

    def is_alive(self, name: NodeName) -> bool:
        """Return whether a node answered within SUSPECT_S."""
        return self.health(name) is LeaseState.ALIVE

    def is_up(self, name: NodeName) -> bool:
        """Return whether a node's lease has not expired."""
        return self.health(name) is not LeaseState.EXPIRED

    def lease_left_s(self, name: NodeName) -> float:
        """Return the time until the lease of a silent node expires."""
        return max(0.0, LEASE_S - self._silent_s(self._members.get(name)))

    def _silent_s(self, member: Member | None) -> float:
        """Return how long a node has been silent: a lease's time if it is unknown or asleep."""
        if member is None or member.is_asleep:
            return LEASE_S
        return self._clock.monotonic_s() - member.heartbeat_s

    def is_returning(self, name: NodeName) -> bool:
        """Return whether a node that was lost is starting again."""
        loading_s = self._members[name].loading_s if name in self._members else None
        return loading_s is not None and self._clock.monotonic_s() - loading_s < SUSPECT_S

    def is_settled(self) -> bool:
        """Return whether every node of the roster has reported its agents or has expired."""
        return self.has_roster and not any(map(self.is_up, self._unlisted))

    def has_all_reports(self) -> bool:
        """Return whether every node of the roster has reported its agents to this router."""
        return self.has_roster and not self._unlisted

    def unreported_nodes(self) -> tuple[NodeName, ...]:
        """Return the nodes that have never reported their agents to this router."""
        return tuple(sorted(self._unlisted))

    def await_reports(self) -> None:
        """Accept only lists requested from now on as reports; request them of all nodes."""
        self._reports_since_s = self._clock.monotonic_s()
        self._unlisted = set(self._members)
        for name in self._members:
            self.nudge(name)

    def has_contacted_all(self) -> bool:
        """Return whether the roster was read, and every node on it has answered or expired."""
        return self.has_roster and not any(map(self.is_up, self._unanswered))

    async def discover(self) -> None:
        """Add nodes that the roster names for the first time."""
        for name, transport in (await self._roster()).items():
            if name not in self._members:
                link = self._connect(name, transport, self._expiry_of(name))
                # A new node has one lease's time to answer.
                self._members[name] = Member(name, link, self._clock.monotonic_s())
                self._unlisted.add(name)
                self._unanswered.add(name)
                self._sorted = tuple(self._members[each] for each in sorted(self._members))
                _LOG.info("node %s joined the roster", name)
        self.has_roster = True

    async def heartbeat(
        self, member: Member, timeout_s: float = SUSPECT_S, *, relist: bool = False
    ) -> None:
        """Request a node's state, and its agents if they changed or `relist` is set."""
        if await self._describe(member, timeout_s) and (relist or self._has_news(member)):
            await self._list(member, whole=relist)

    async def refresh(self, timeout_s: float = HEARTBEAT_S, *, relist: bool = False) -> None:
        """Send every unexpired node a heartbeat and wait for the answers."""
        live = [m for m in self.members if self.is_up(m.name)]
        await asyncio.gather(*(self.heartbeat(member, timeout_s, relist=relist) for member in live))

    async def request_state(self, name: NodeName) -> None:
        """Request one node's state now; wait a heartbeat's time for it."""
        member = self._members.get(name)
        if member is not None:
            await self._describe(member, HEARTBEAT_S)

    def nudge(self, name: NodeName, *, whole: bool = False) -> None:
        """Send a node a heartbeat now, unless one is in progress; `whole` requests all of it."""
        member = self._members.get(name)
        if member and whole:
            member.known = (0, 0)
        if member and (member.pulse is None or member.pulse.done()):
            member.pulse = asyncio.create_task(self._pulse(member))

    async def run(self) -> None:
        """Send heartbeats to every node until cancelled; a hung node delays no other."""
        ticking = asyncio.create_task(self._stalls.run(self.heartbeat_s))
        try:
            while True:
                if self._scouting is None or self._scouting.done():
                    # Without its head, Ray may block this for a minute; the nodes keep serving.
                    self._scouting = asyncio.create_task(self._scout())
                self._count_expired()
                await self._nudge_all()
        finally:
            ticking.cancel()
            await self.close()

    async def _nudge_all(self) -> None:
        """Send every node a heartbeat, a few at a time over the whole period."""
        names = list(self._members)
        rounds = max(1, math.ceil(len(names) / HEARTBEATS_AT_ONCE_MAX))
        for first in range(rounds):
            for name in names[first::rounds]:
                self.nudge(name)
            await asyncio.sleep(self.heartbeat_s / rounds)

    async def close(self) -> None:
        """Cancel the heartbeats in progress."""
        pulses = [t for m in self.members for t in (m.pulse, m.listing)]
        tasks = [task for task in (self._scouting, *pulses) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _scout(self) -> None:
        try:
            await self.discover()
        except FabricError as error:
            _LOG.warning("cannot read the list of nodes: %s", error.message)
        for member in self.members:
            if member.view is None:
                self.nudge(member.name)

    async def _pulse(self, member: Member) -> None:
        try:
            async with self._stalls.patience(SUSPECT_S):
                has_answered = await self._describe(member, PULSE_TIMEOUT_S)
        except TimeoutError:
            return
        idle = member.listing is None or member.listing.done()
        # A long list has its own task: it must not hold back the next heartbeat.
        if has_answered and idle and self._has_news(member):
            member.listing = asyncio.create_task(self._list(member))

    def _forgive_stall(self, seconds: float) -> None:
        """Subtract the time in which this router itself stalled from every node's silence.

        Otherwise a closed lid, or too many requests, would end all leases at once.
        """
        now_s = self._clock.monotonic_s()
        for member in self._members.values():
            member.heartbeat_s = min(now_s, member.heartbeat_s + seconds)

    def _count_expired(self) -> None:
        self._stalls.check_lateness()
        now_s = self._clock.monotonic_s()
        for member in self._members.values():
            # Changes in an answer are handled when it arrives.
            if not member.was_settled or now_s - member.heartbeat_s >= SUSPECT_S:
                self._report_state(member)

    def _report_state(self, member: Member) -> None:
        """Count a lease that ended, and report the node's state to the watch."""
        health = self.health(member.name)
        is_expired = health is LeaseState.EXPIRED
        if is_expired and not member.was_expired:
            self.expired_count += 1
            cause = "its machine sleeps" if member.is_asleep else "it is silent"
            _LOG.warning("the lease of %s ended: %s", member.name, cause)
        member.was_expired = is_expired
        is_alive = health is LeaseState.ALIVE and member.view is not None
        member.was_settled = is_alive and member.failure is None and member.loading_s is None
        self._watch(member, self.state_of(member, health))

    def _expiry_of(self, name: NodeName) -> Callable[[], bool]:
        return lambda: not self.is_up(name)

    async def _bring_up_to_date(self, member: Member, view: NodeView) -> None:
        if self._catch_up is None or view.name != member.name:
            return
        is_known = member.view is not None and member.view.incarnation == view.incarnation
        is_present = is_known and self.is_up(member.name)
        if not is_present or not self._catch_up.is_caught_up(view):
            await self._catch_up.catch_up(
                member.link, view, lambda: tuple(self._members), is_present=is_present
            )

    async def _describe(self, member: Member, timeout_s: float) -> bool:
        sent_s = self._clock.monotonic_s()
        try:
            view, numbers = await _read_view(member, timeout_s)
            await self._bring_up_to_date(member, view)
        except StartFailedError as error:
            # It stays silent; only the reason is known.
            again_s = self._clock.monotonic_s() + error.retry_after_s
            member.failure, member.was_settled = StartFailure(error.message, again_s), False
            return False
        except RetryLaterError:
            member.loading_s, member.failure, member.was_settled = sent_s, None, False
            if member.view is None:
                member.heartbeat_s = sent_s  # no stale state to protect
            return False
        except FabricError as error:
            if why := version_mismatch_message(error):
                self._note_refused(member, why)
                return False
            # The lease handles its silence.
            member.failure, member.was_settled = None, member.was_settled and not member.failure
            _LOG.debug("no heartbeat from %s: %s", member.name, error.code)
            return False
        if view.name != member.name:
            _LOG.error("node %s reports the name %s: ignored", member.name, view.name)
            return False
        if member.view is None or sent_s >= member.heartbeat_s:
            restarted = member.view is not None and view.incarnation != member.view.incarnation
            member.view, member.loading_s, member.failure = view, None, None
            member.known = numbers
            member.heartbeat_s = max(sent_s, member.heartbeat_s)
            member.link.http_url = view.http_url.rstrip("/")
            member.link.reads_origins = view.reads_origins
            if sent_s >= self._reports_since_s and member.listed == member.state:
                self._unlisted.discard(member.name)  # its list of agents is the latest one
            if restarted:
                _LOG.info("node %s restarted", member.name)
                member.supports_changes = member.supports_rows = True  # perhaps of another version
                self._reports.on_restart(member.name)
            self._note_view(member)
        return True

    def _note_refused(self, member: Member, why: str) -> None:
        """Show why a node that answers is refused; its lease ends as that of a silent one."""
        if member.failure is None or member.failure.message != why:
            _LOG.error("%s", why)
        member.failure, member.was_settled = StartFailure(why), False

    def _note_view(self, member: Member) -> None:
        assert member.view is not None, "it has answered"
        name, model = member.name, member.view.model
        self._unanswered.discard(name)
        if name not in self._by_model.setdefault(model, {}):
            for names in self._by_model.values():
                names.pop(name, None)
            self._by_model[model][name] = None
        self._report_state(member)

    def _has_news(self, member: Member) -> bool:
        return member.listed != member.state or self._reports.needs_whole_list(member.name)

    async def _list(self, member: Member, *, whole: bool = False) -> None:
        requested_s = self._clock.monotonic_s()
        last_version = member.listed or (0, 0)
        if requested_s - member.whole_s > WHOLE_LIST_S or self._reports.needs_whole_list(
            member.name
        ):
            whole = True
        try:
            agents = await _read_list(member, (0, 0) if whole else last_version)
        except FabricError as error:
            _LOG.debug("no agents from %s: %s", member.name, error.code)
            return
        view = member.view
        if view is None or agents.node != member.name or agents.incarnation != view.incarnation:
            return  # the next heartbeat requests it again
        await self._reports.on_list(agents, requested_s)
        items, agents = list(agents.agents), replace(agents, agents=())
        await free_in_steps(items)
        version = (agents.incarnation, agents.changes)
        same_life = member.listed is not None and member.listed[0] == agents.incarnation
        if not same_life or member.listed is None or version >= member.listed:
            self.lists_count += member.listed != version
            member.listed = version
            if requested_s >= self._reports_since_s:
                self._unlisted.discard(member.name)
        if not agents.since:
            member.whole_s = requested_s
