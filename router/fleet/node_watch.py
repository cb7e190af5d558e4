"""Events about nodes and links: changed states, memory and measured rates."""

from fabric.control.node_calls import NodeView
from fabric.ids import NodeName
from fabric.net.links import LinkKind
from router.events.bus import Publish
from router.events.fleet_event import LinkMeasured, MemoryChanged, NodeChanged
from router.fleet.membership import Member
from router.limits import LINK_RATE_NEWS
from router.placement.link_rates import best_by_kind


class NodeWatch:
    """Last published state of every node, its memory and its links."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._states: dict[NodeName, str] = {}
        self._memory: dict[NodeName, MemoryChanged] = {}
        self._rates: dict[NodeName, dict[tuple[NodeName, LinkKind], float]] = {}

    def look(self, member: Member, state: str) -> None:
        """Publish what has changed since the last call for this node."""
        before = self._states.get(member.name)
        if state != before:
            self._states[member.name] = state
            self._publish(NodeChanged(member.name, state, before))
        if member.view is not None:
            self._look_at_memory(member.name, member.view)
            self._look_at_links(member)

    def _look_at_memory(self, name: NodeName, view: NodeView) -> None:
        limits = view.hot_limit_bytes, view.hot_total_bytes
        now, last = MemoryChanged(name, view.memory_pressure, *limits), self._memory.get(name)
        self._memory[name] = now
        if now != last and not (now.is_usual and (last is None or last.is_usual)):
            self._publish(now)

    def _look_at_links(self, member: Member) -> None:
        assert member.view is not None, "it has answered"
        published, rates = (
            self._rates.get(member.name, {}),
            dict[tuple[NodeName, LinkKind], float](),
        )
        for (peer, kind), link in best_by_kind(member.view.links).items():
            rate, last = link.bytes_per_s, published.get((peer, kind))
            if rate is None:
                continue
            is_news = last is None or abs(rate - last) > LINK_RATE_NEWS * last
            rates[peer, kind] = rate if is_news or last is None else last
            if is_news:
                self._publish(LinkMeasured(member.name, peer, kind, rate, link.rtt_s))
        self._rates[member.name] = rates
