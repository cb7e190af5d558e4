"""Seeding of nodes with few agents with prefixes that agents elsewhere share, at lowest priority.

    sweep   every ready node with few agents that was not seeded recently
    ask     each peer with the same model, the fastest link first, for its shared prefixes
    take    one prefix after the other, and none while an agent is being moved

No request waits for it. The only state is when to seed each node again: a restarted router seeds it
once more, and the node fetches only what it lacks.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from fabric.control.node_calls import READY, AbortMigration, Copied, NodeView
from fabric.control.span_calls import OfferSpans, ReturnSpans, SpanOffers, TakeSpan
from fabric.errors import FabricError
from fabric.ids import AgentKey, NodeName
from fabric.limits import PREFIX_SEEDING_TIMEOUT_S, SPAN_SHARERS_MIN
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_migration
from router.limits import (
    PREFIX_SEEDING_AGENTS_MAX,
    PREFIX_SEEDING_INTERVAL_S,
    PREFIX_SEEDING_RETRY_S,
    SEEDING_PEERS_MAX,
)
from router.moves.move_registry import MoveRegistry
from router.moves.retries import best_effort_call
from router.placement.link_rates import rate
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.prefix_seeding")
_FULL = frozenset({"no_room", "not_wanted"})


class _MovesGoFirstError(FabricError):
    """Prefix seeding pauses while an agent is being moved."""

    code = "moves_go_first"


@dataclass(frozen=True, slots=True)
class _Rest:
    incarnation: int
    until_s: float


class PrefixSeeding:
    """Seeding of one node after the other."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._moves = moves
        self._telemetry = telemetry
        self._rests: dict[NodeName, _Rest] = {}

    async def run(self) -> None:
        """Sweep once per heartbeat until cancelled."""
        while True:
            await asyncio.sleep(self._fleet.membership.heartbeat_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Seed every node that is due from its peers."""
        views = [member.view for member in self._fleet.membership.members]
        due = [view for view in views if view is not None and self._is_due(view)]
        for node in due:
            is_ready = node.state == READY and self._fleet.is_alive(node.name)
            if is_ready and (peers := self._peers(node)):
                is_done = await self._seed(node, peers)
                rest_s = PREFIX_SEEDING_INTERVAL_S if is_done else PREFIX_SEEDING_RETRY_S
                until_s = self._fleet.clock.monotonic_s() + rest_s
                self._rests[node.name] = _Rest(node.incarnation, until_s)

    def _is_due(self, node: NodeView) -> bool:
        if node.agents > PREFIX_SEEDING_AGENTS_MAX or not node.reuse or node.degraded is not None:
            return False
        rest = self._rests.get(node.name)
        if rest is None or rest.incarnation != node.incarnation:
            return True
        return self._fleet.clock.monotonic_s() >= rest.until_s

    def _peers(self, node: NodeView) -> list[NodeView]:
        """Return the nodes that may have shared prefixes, the fastest link first.

        Of a large fleet, they are the node's measured peers and those with the most agents.
        """
        peers = [
            member.view
            for member in self._fleet.membership.members
            if member.view is not None
            and member.name != node.name
            and member.view.fingerprint == node.fingerprint
            and member.view.agents >= SPAN_SHARERS_MIN
        ]
        if len(peers) > SEEDING_PEERS_MAX:
            measured = {link.peer for link in node.links}
            peers.sort(key=lambda peer: (peer.name not in measured, -peer.agents, peer.name))
            del peers[SEEDING_PEERS_MAX:]
        peers = [peer for peer in peers if self._fleet.is_alive(peer.name)]
        return sorted(peers, key=lambda peer: (-rate(peer, node), peer.name))

    async def _seed(self, node: NodeView, peers: list[NodeView]) -> bool:
        """Seed a node from one peer after the other; return whether every peer answered."""
        is_done = True
        with suppress(TimeoutError):
            async with asyncio.timeout(PREFIX_SEEDING_TIMEOUT_S):
                for peer in peers:
                    try:
                        await self._copy_prefixes(peer.name, node.name)
                    except FabricError as error:
                        if error.code in _FULL:
                            break
                        _LOG.info("seeding %s from %s: %s", node.name, peer.name, error.code)
                        is_done = False
        return is_done

    async def _copy_prefixes(self, source: NodeName, target: NodeName) -> None:
        source_link, target_link = self._fleet.link(source), self._fleet.link(target)
        name, spans = fresh_migration(), SpanOffers(()).spans
        self._require_no_moves()
        self._fleet.partners.note(source, target)
        try:
            spans = (await source_link.call(OfferSpans(name, target), SpanOffers)).spans
            for span in spans:
                self._require_no_moves()
                copied = await target_link.call(TakeSpan(name, source, span.offer), Copied)
                self._telemetry.note_copy("span", copied.bytes_sent, ok=True)
        except BaseException as error:
            if getattr(error, "code", None) not in _FULL:
                self._telemetry.note_copy("span", 0, ok=False)
            for span in spans[:1]:  # the target may have begun although no answer came
                abort = AbortMigration(*span.key, name)
                await asyncio.shield(best_effort_call(target_link, abort))
            raise
        finally:
            for span in spans[:1]:  # withdraws all that is offered under this name
                abort = AbortMigration(*span.key, name)
                await asyncio.shield(best_effort_call(source_link, abort))

    def _require_no_moves(self) -> None:
        if not self._moves.is_idle:
            message = "an agent is being moved"
            raise _MovesGoFirstError(message)


async def revoke_shared_prefixes(fleet: Fleet, key: AgentKey) -> None:
    """Ask all live nodes to drop the shared prefixes that came from an agent; best effort."""
    members = [m for m in fleet.membership.members if fleet.is_alive(m.name)]
    call = ReturnSpans(*key)
    await asyncio.gather(*(best_effort_call(member.link, call) for member in members))
