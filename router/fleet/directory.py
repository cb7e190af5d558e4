"""Directory of agents' owners, rebuilt from the nodes' reports: the highest epoch wins.

    holdings   (tenant, agent) ─▶ node ─▶ (epoch, state)     one node's report on one agent
    owner      the owned or sealed holding of the highest epoch that was not erased
    reserved   (tenant, agent) ─▶ node, until the first turn there has ended
    issued     (tenant, agent) ─▶ the last epoch issued by this router, or by an earlier one as far
                                  as nodes report it: no epoch is issued to two nodes

Soft state only. A full list replaces all earlier reports of its node, except those noted after the
list was requested; a list of changes replaces the reports on the agents that it names. Lists may
arrive late, twice, or in any order.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentList, AgentView
from fabric.edit_mode import EditMode
from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.record.manifest import OwnerState
from router.events import AgentCreated, AgentErased, AgentEvicted, AgentFound, AgentMoved, Publish
from router.limits import EPOCHS_ISSUED_MAX


def settings_fingerprint(view: AgentView) -> object:
    """Return an agent's settings and directives, whether or not its memory reflects them yet."""
    directives = tuple(replace(d, is_applied=False, message=None) for d in view.directives)
    return view.settings, directives


def applied_forgets(view: AgentView) -> frozenset[object]:
    """Return the directives to forget a message that an agent's memory reflects already."""
    return frozenset(
        replace(directive, message=None, dropped_chars=None, dropped_digest=None)
        for directive in view.directives
        if directive.mode is EditMode.FORGET and directive.is_applied
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """Report of one node on one agent; `view` is missing until the node lists it."""

    node: NodeName
    epoch: int
    state: OwnerState
    noted_s: float
    group: str | None = None
    view: AgentView | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the agent is in the node's memory, as it is before its node lists it."""
        return self.view is None or "hot" in self.view.tiers

    def is_current(self, owner: "Holding") -> bool:
        """Return whether a node's copy has what the owner saved last.

        Revisions are not compared: a lost owner and its successor continue from the same one.
        """
        if self.view is None or owner.view is None:
            return False
        has_tail = self.view.tail == owner.view.tail != ""
        return has_tail and settings_fingerprint(self.view) == settings_fingerprint(owner.view)


@dataclass(slots=True)
class StartReservation:
    """Node on which an agent without a listed owner is being started, and the turns that do so."""

    node: NodeName
    epoch: int
    turns_count: int = 0


class EpochMap:
    """Last epoch given out per agent; the tenant with the most agents loses its oldest first."""

    def __init__(self, agents_max: int) -> None:
        self._agents_max = agents_max
        self._by_tenant: dict[TenantId, OrderedDict[AgentId, int]] = {}
        self._count = 0

    def last(self, key: AgentKey) -> int:
        """Return the highest epoch noted for an agent; 0 if none was."""
        epochs = self._by_tenant.get(key[0])
        return epochs.get(key[1], 0) if epochs is not None else 0

    def note(self, key: AgentKey, epoch: int) -> None:
        """Record `epoch`, unless a higher one is recorded already."""
        tenant, agent = key
        epochs = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += agent not in epochs
        epochs[agent] = max(epoch, epochs.pop(agent, 0))
        if self._count > self._agents_max:
            largest = max(self._by_tenant.values(), key=len)
            largest.popitem(last=False)
            self._count -= 1


class Directory:
    """Holdings of all agents, and reservations of agents that are being started."""

    def __init__(
        self,
        publish: Publish = lambda _: None,
        floor: Callable[[AgentKey], int] = lambda _: 0,
    ) -> None:
        """Start empty; `floor` returns the epoch up to which an agent was erased."""
        self.floor = floor
        self._publish = publish
        self._holdings: dict[AgentKey, dict[NodeName, Holding]] = {}
        # Dictionaries, not sets, whose order would differ from process to process.
        self._by_node: dict[NodeName, dict[AgentKey, None]] = {}
        self._groups: dict[tuple[TenantId, str], set[AgentKey]] = {}
        self._versions: dict[NodeName, tuple[int, int]] = {}
        self._unlisted: dict[NodeName, set[AgentKey]] = {}  # noted, but not listed by the node yet
        self._doubted: set[NodeName] = set()
        self._reserved: dict[AgentKey, StartReservation] = {}
        self._issued = EpochMap(EPOCHS_ISSUED_MAX)
        self._promised = EpochMap(EPOCHS_ISSUED_MAX)
        self._own = EpochMap(EPOCHS_ISSUED_MAX)  # of both, those given out by this router
        self._in_doubt: set[AgentKey] = set()
        self._nodes: dict[AgentKey, NodeName] = {}  # node of each agent, or of its start
        self._agents_at: Counter[NodeName] = Counter()
        self.recounted: set[NodeName] = set()  # nodes whose number of agents changed
        self._published: dict[AgentKey, NodeName] = {}  # the owner published last
        self._followers: list[Callable[[AgentKey], None]] = []

    def begin_list(self, agents: AgentList) -> bool:
        """Return whether a list may be applied: no later one was, and none is missing before it."""
        version = (agents.incarnation, agents.changes)
        last_version = self._versions.get(agents.node)
        if last_version is not None and version < last_version:
            return False
        if agents.since and (
            last_version is None or last_version < (agents.incarnation, agents.since)
        ):
            self._doubted.add(agents.node)  # the changes before it are missing here
            return False
        self._versions[agents.node] = version
        return True

    def put_listed(
        self, node: NodeName, view: AgentView, requested_s: float, *, is_first_list: bool
    ) -> None:
        """Note one agent of a node's list, unless something later is known."""
        old = self.holding(view.key, node)
        is_later = old is not None and (old.epoch > view.epoch or old.view is not None)
        if old is not None and old.noted_s > requested_s and is_later:
            return  # the list was requested before the holding was noted
        if old is None or old.view != view or (old.epoch, old.state) != (view.epoch, view.state):
            listed = Holding(node, view.epoch, view.state, requested_s, view.group, view)
            self._put(view.key, listed, is_first_list=is_first_list)

    def keys_absent_from(self, agents: AgentList) -> dict[AgentKey, None]:
        """Return the agents that a node no longer has, but for those that its list contains."""
        if agents.since:
            return dict.fromkeys((name.tenant, name.agent) for name in agents.gone)
        return self._by_node.get(agents.node, {}).copy()

    def end_list(
        self, agents: AgentList, absent: Iterable[AgentKey], requested_s: float
    ) -> list[AgentKey]:
        """End the application of a list that lacks the agents `absent`; return those forgotten."""
        node_holdings = self._by_node.get(agents.node, {})
        removed = [
            key
            for key in absent
            if key in node_holdings and self._holdings[key][agents.node].noted_s <= requested_s
        ]
        for key in removed:
            self.forget(key, agents.node)
        unlisted = self._unlisted.get(agents.node, set())
        if agents.since and any(
            self._holdings[key][agents.node].noted_s <= requested_s for key in unlisted
        ):
            self._doubted.add(agents.node)
        elif not agents.since:
            self._doubted.discard(agents.node)
        return removed

    def has_list(self, node: NodeName) -> bool:
        """Return whether a list of the node was applied in its present life."""
        return node in self._versions

    def needs_whole_list(self, node: NodeName) -> bool:
        """Return whether a node may lack an agent noted here, which only a whole list shows."""
        return node in self._doubted

    def doubt(self, node: NodeName) -> None:
        """Note that a node's whole list is needed: something before its last one is missing."""
        self._doubted.add(node)

    def restart(self, node: NodeName) -> None:
        """Accept any list from a node's new incarnation."""
        self._versions.pop(node, None)

    def note(self, key: AgentKey, holding: Holding) -> None:
        """Note an owner that a node just reported, before its next list.

        A late answer is ignored: a node's epochs only rise, and no list would correct it.
        """
        old = self._holdings.get(key, {}).get(holding.node)
        is_late = old is not None and holding.epoch < old.epoch
        is_known = old is not None and (old.epoch, old.state) == (holding.epoch, holding.state)
        if not is_late and not is_known:
            self._put(key, holding)

    def note_settings(self, key: AgentKey, view: AgentView) -> None:
        """Note an agent's settings as its owner answered, before its next list."""
        holding = self.holding(key, view.node)
        if holding is not None and holding.view is not None and holding.epoch == view.epoch:
            view_now = replace(holding.view, settings=view.settings, directives=view.directives)
            self._holdings[key][view.node] = replace(holding, view=view_now)
            self._call_followers(key)

    def is_private(self, key: AgentKey) -> bool:
        """Return whether an agent's memory is private, by its latest report."""
        latest = max(
            (h for h in self.unerased_holdings(key) if h.view), key=_authority, default=None
        )
        settings = latest.view.settings if latest and latest.view else None
        return settings is not None and settings.is_private

    def forget(self, key: AgentKey, node: NodeName) -> None:
        """Remove a node's holding of an agent."""
        self._by_node.get(node, {}).pop(key, None)
        nodes = self._holdings.get(key, {})
        dropped = nodes.pop(node, None)
        self._unlisted.get(node, set()).discard(key)
        if dropped is not None:
            self.bar_epoch(
                key, dropped.epoch
            )  # it may have been evicted: a later agent starts above
            if dropped.epoch > self.floor(key):
                self._publish(AgentEvicted(key, node, dropped.state is OwnerState.REPLICA))
            if dropped.group is not None:
                self._leave_group(key, dropped.group)
        if not nodes:
            self._holdings.pop(key, None)
        self._update(key)

    def note_erased(self, key: AgentKey) -> None:
        """Update an agent's owner and epochs after an erasure."""
        if self._published.pop(key, None) is not None:
            self._publish(AgentErased(key))
        self._update(key)

    def owner(self, key: AgentKey) -> Holding | None:
        """Return the owned or sealed holding of the highest epoch."""
        owners = [h for h in self.unerased_holdings(key) if h.state is not OwnerState.REPLICA]
        return max(owners, key=_rank) if len(owners) > 1 else owners[0] if owners else None

    def released_owner(self, key: AgentKey) -> Holding | None:
        """Return the holding that released an agent whose owner is unknown.

        Its record names its own node, or it is noted and not listed yet: it just released it.
        """
        latest = max(self.unerased_holdings(key), key=_rank, default=None)
        if latest is None or self.owner(key) is not None:
            return None
        return latest if latest.view is None or latest.view.node == latest.node else None

    def holding(self, key: AgentKey, node: NodeName) -> Holding | None:
        return self._holdings.get(key, {}).get(node)

    def holdings(self, key: AgentKey) -> tuple[Holding, ...]:
        """Return every node's holding of the agent, by node."""
        nodes = self._holdings.get(key, {})
        names = sorted(nodes) if len(nodes) > 1 else nodes
        return tuple([nodes[name] for name in names])

    def unerased_holdings(self, key: AgentKey) -> tuple[Holding, ...]:
        """Return the holdings that were not erased, by node."""
        holdings = self.holdings(key)
        floor = self.floor(key) if holdings else 0
        return tuple([h for h in holdings if h.epoch > floor])

    def highest(self, key: AgentKey) -> int:
        """Return the highest epoch that any node reports of the agent; 0 if none does."""
        return max((holding.epoch for holding in self.unerased_holdings(key)), default=0)

    def erasing_nodes(self, key: AgentKey) -> tuple[NodeName, ...]:
        """Return the nodes that still have erased data of the agent."""
        current = self.unerased_holdings(key)
        return tuple(h.node for h in self.holdings(key) if h not in current)

    def next_epoch(self, key: AgentKey) -> int:
        """Return an epoch above any at which a node, reported or not, may own the agent.

        0 for an agent that no node has reported: its node starts with 1.
        """
        holdings = self.holdings(key)
        reported = max((holding.epoch for holding in holdings), default=0)
        # If only replicas are known, an unreported owner may be one epoch above them.
        unreported = 1 if holdings and self.owner(key) is None else 0
        issued = max(self._issued.last(key), self._promised.last(key), self.floor(key))
        return max(reported + unreported, issued) + 1 if holdings or issued else 0

    def next_move_epoch(self, key: AgentKey, holding: Holding) -> int:
        """Return an epoch above all known, issued and promised ones, except a starting turn's.

        A node may still claim an epoch that was issued to it and not used yet. While a turn is
        being sent to such a node, the move's commit is refused instead.
        """
        issued = 0 if self.reservation(key) is not None else self.issued_epoch(key)
        reported = max(held.epoch for held in (holding, *self.holdings(key)))
        return max(reported, issued, self._promised.last(key)) + 1

    def issued_epoch(self, key: AgentKey) -> int:
        """Return the last epoch that was issued or erased; turns at earlier epochs are fenced."""
        return max(self._issued.last(key), self.floor(key))

    def issue(self, key: AgentKey, epoch: int) -> None:
        """Record `epoch` as issued: no epoch up to it is issued again."""
        self._issued.note(key, epoch)
        self._own.note(key, epoch)

    def promise(self, key: AgentKey, epoch: int) -> None:
        """Reserve `epoch` for a move, which may make it valid. It fences no turn."""
        self.bar_epoch(key, epoch)
        self._own.note(key, epoch)

    def bar_epoch(self, key: AgentKey, epoch: int) -> None:
        """Never issue `epoch`, since it was valid or reached a node. It fences no turn."""
        self._promised.note(key, epoch)

    def begin_term(self) -> None:
        """Forget which epochs this router issued: another one may have issued later ones."""
        self._own = EpochMap(EPOCHS_ISSUED_MAX)

    def has_issued(self, key: AgentKey, epoch: int) -> bool:
        """Return whether this router issued `epoch`, and so knows all epochs below it."""
        return self._own.last(key) >= epoch

    def agents(self, tenant: TenantId) -> list[AgentId]:
        return sorted(key[1] for key in self._holdings if key[0] == tenant)

    def all_keys(self) -> list[AgentKey]:
        return list(self._holdings)

    def agents_of_node(self, node: NodeName) -> list[AgentKey]:
        """Return the agents that the node owns, has sealed for a move, or has released, sorted."""
        keys = self._by_node.get(node, {})
        holders = ((key, self.owner(key) or self.released_owner(key)) for key in keys)
        return sorted(key for key, holding in holders if holding and holding.node == node)

    def agents_count(self, node: NodeName) -> int:
        """Count the agents that the node owns or is starting."""
        return self._agents_at[node]

    def epoch_of(self, node: NodeName) -> int:
        """Return the highest epoch at which a node owns an agent; 0 if it owns none."""
        owned = (self._holdings[key][node] for key in self._by_node.get(node, {}))
        return max((h.epoch for h in owned if h.state is OwnerState.OWNED), default=0)

    def group_owners(self, tenant: TenantId, group: str) -> list[Holding]:
        """Return the owners of a group's conversations, the one named like the group first."""
        keys = sorted(self._groups.get((tenant, group), set()))
        keys.sort(key=lambda key: key[1] != group)
        owners = (self.owner(key) for key in keys)
        return [holding for holding in owners if holding is not None]

    def undecided_agents(self) -> tuple[AgentKey, ...]:
        """Return the agents that are sealed, or that several nodes claim."""
        return tuple(sorted(self._in_doubt))

    def reservation(self, key: AgentKey) -> StartReservation | None:
        return self._reserved.get(key)

    def start_reservation(self, key: AgentKey) -> StartReservation | None:
        """Return the reservation of an agent that starts at an epoch above its owner's."""
        started = self._reserved.get(key)
        owner = self.owner(key) if started is not None else None
        return started if owner is None or (started and started.epoch > owner.epoch) else None

    def reserve(self, key: AgentKey, node: NodeName, epoch: int) -> StartReservation:
        """Reserve a node for an agent that is started there, replacing an earlier reservation."""
        # A slow node tried before may still accept the agent: not at this epoch.
        self.issue(key, max(epoch, 1))
        self._reserved[key] = StartReservation(node, epoch)
        self._note_node(key)
        return self._reserved[key]

    def release(self, key: AgentKey, reservation: StartReservation) -> None:
        """End one turn's use of a reservation; the last one removes it."""
        assert reservation.turns_count > 0, "released more often than joined"
        reservation.turns_count -= 1
        if reservation.turns_count == 0 and self._reserved.get(key) is reservation:
            del self._reserved[key]
            self._note_node(key)

    def _put(self, key: AgentKey, holding: Holding, *, is_first_list: bool = False) -> None:
        nodes = self._holdings.setdefault(key, {})
        old = nodes.get(holding.node)
        nodes[holding.node] = holding
        self._by_node.setdefault(holding.node, {})[key] = None
        unlisted = self._unlisted.setdefault(holding.node, set())
        unlisted.add(key) if holding.view is None else unlisted.discard(key)
        if holding.group is not None:
            self._groups.setdefault((key[0], holding.group), set()).add(key)
        if old and old.group is not None and old.group != holding.group:
            self._leave_group(key, old.group)
        self._update(key, is_first_list=is_first_list)

    def _leave_group(self, key: AgentKey, group: str) -> None:
        if any(h.group == group for h in self.holdings(key)):
            return
        members = self._groups.get((key[0], group), set())
        members.discard(key)
        if not members:
            self._groups.pop((key[0], group), None)

    def _note_node(self, key: AgentKey) -> None:
        started, owner = self._reserved.get(key), self.owner(key)
        node = started.node if started else owner.node if owner else None
        before = self._nodes.get(key)
        if node == before:
            return
        if before is not None:
            del self._nodes[key]
            self._agents_at[before] -= 1
            self.recounted.add(before)
        if node is not None:
            self._nodes[key] = node
            self._agents_at[node] += 1
            self.recounted.add(node)

    def _publish_owner(self, key: AgentKey, *, is_first_list: bool) -> None:
        """Publish an agent's owner, if that changed; the only place that does."""
        owner, published = self.owner(key), self._published.get(key)
        if owner is None:
            if key not in self._holdings:
                self._published.pop(key, None)
            return
        if published is None:
            kind = AgentFound if is_first_list else AgentCreated
            self._publish(kind(key, owner.node, owner.epoch))
        elif published != owner.node:
            self._publish(AgentMoved(key, published, owner.node, owner.epoch))
        self._published[key] = owner.node

    def follow(self, follower: Callable[[AgentKey], None]) -> None:
        """Call `follower` with every agent of which a holding changes."""
        self._followers.append(follower)

    def has_copies(self, key: AgentKey) -> bool:
        """Return whether several nodes hold something of an agent."""
        return len(self._holdings.get(key, ())) > 1

    def keys_at(self, node: NodeName) -> list[AgentKey]:
        """Return the agents of which a node holds anything."""
        return list(self._by_node.get(node, ()))

    def _call_followers(self, key: AgentKey) -> None:
        for follower in self._followers:
            follower(key)

    def _update(self, key: AgentKey, *, is_first_list: bool = False) -> None:
        self._call_followers(key)
        self._note_node(key)
        self._publish_owner(key, is_first_list=is_first_list)
        claims = [h for h in self.unerased_holdings(key) if h.state is not OwnerState.REPLICA]
        if len(claims) > 1:
            self._fence_below(key, max(claim.epoch for claim in claims))
        if len(claims) > 1 or any(h.state is OwnerState.SEALED for h in claims):
            self._in_doubt.add(key)
        else:
            self._in_doubt.discard(key)

    def _fence_below(self, key: AgentKey, epoch: int) -> None:
        """Fence the turns of older claims, unless a move of this router made the newer one.

        Such a move includes all that was acknowledged before it. Any other newer claim counts as
        given out by an earlier router.
        """
        if epoch > self._promised.last(key):
            self._issued.note(key, epoch)


def _authority(holding: Holding) -> tuple[bool, tuple[int, bool, float, str]]:
    return holding.state is not OwnerState.REPLICA, _rank(holding)


def _rank(holding: Holding) -> tuple[int, bool, float, str]:
    # Of equal epochs, which are never given out, the one with more turns has acknowledged more.
    # A holding that is noted and not listed yet results from this router's own last call.
    turns = holding.view.revision if holding.view is not None else math.inf
    return (holding.epoch, holding.state is OwnerState.OWNED, turns, holding.node)
