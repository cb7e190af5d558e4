"""Nodes that hold next to nothing are given what agents elsewhere begin with, with lowest priority.

    sweep   every ready node of few agents that was not given it for a while
    ask     each peer of the same model, the best link first, what several of its agents begin with
    take    one beginning after the other, and none while an agent is on the move

Nobody waits for it, and nothing is remembered but when to ask again: a restart of the router asks
once more, and the node fetches only what it lacks.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from fabric.control.copy_calls import OfferSpans, ReturnSpans, SpanOffers, TakeSpan
from fabric.control.node_calls import AbortMigration, Copied, NodeView
from fabric.errors import FabricError
from fabric.ids import AgentKey, NodeName
from fabric.limits import NEWCOMER_TIMEOUT_S, SPAN_SHARERS_MIN
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_migration
from router.limits import NEWCOMER_AGAIN_S, NEWCOMER_AGENTS_MAX, NEWCOMER_REST_S
from router.moves.attempts import told
from router.moves.migrations import Migrations
from router.placement.link_rates import rate
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.newcomers")
_FULL = frozenset({"no_room", "not_wanted"})


class _MovesGoFirstError(FabricError):
    """An agent is on the move."""

    code = "moves_go_first"


@dataclass(frozen=True, slots=True)
class _Rest:
    incarnation: int
    until_s: float


class Newcomers:
    """Sees to them, one at a time."""

    def __init__(self, fleet: Fleet, migrations: Migrations, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._telemetry = telemetry
        self._rests: dict[NodeName, _Rest] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._fleet.membership.heartbeat_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Give every node that is due what its peers share."""
        for node in self._fleet.ready():
            if self._is_due(node) and (peers := self._peers(node)):
                is_done = await self._give(node, peers)
                rest_s = NEWCOMER_AGAIN_S if is_done else NEWCOMER_REST_S
                until_s = self._fleet.clock.monotonic_s() + rest_s
                self._rests[node.name] = _Rest(node.incarnation, until_s)

    def _is_due(self, node: NodeView) -> bool:
        if node.agents > NEWCOMER_AGENTS_MAX or not node.reuse or node.degraded is not None:
            return False
        rest = self._rests.get(node.name)
        is_resting = rest is not None and rest.incarnation == node.incarnation
        now_s = self._fleet.clock.monotonic_s()
        return not (is_resting and rest is not None and now_s < rest.until_s)

    def _peers(self, node: NodeView) -> list[NodeView]:
        """List who may have something, whoever is reached best first."""
        members = [m for m in self._fleet.membership.members if self._fleet.is_alive(m.name)]
        found = [
            member.view
            for member in members
            if member.view is not None
            and member.name != node.name
            and member.view.fingerprint == node.fingerprint
            and member.view.agents >= SPAN_SHARERS_MIN
        ]
        return sorted(found, key=lambda peer: (-rate(peer, node), peer.name))

    async def _give(self, node: NodeView, peers: list[NodeView]) -> bool:
        """Ask one peer after the other; say whether all told what they have."""
        is_done = True
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWCOMER_TIMEOUT_S):
                for peer in peers:
                    try:
                        await self._fetch(peer.name, node.name)
                    except FabricError as error:
                        if error.code in _FULL:
                            break
                        _LOG.info("%s gave %s nothing more: %s", peer.name, node.name, error.code)
                        is_done = False
        return is_done

    async def _fetch(self, source: NodeName, target: NodeName) -> None:
        giver, taker = self._fleet.link(source), self._fleet.link(target)
        name, spans = fresh_migration(), SpanOffers(()).spans
        self._let_moves_go_first()
        try:
            spans = (await giver.call(OfferSpans(name, target), SpanOffers)).spans
            for span in spans:
                self._let_moves_go_first()
                copied = await taker.call(TakeSpan(name, source, span.offer), Copied)
                self._telemetry.copied("span", copied.bytes_sent, ok=True)
        except BaseException as error:
            if getattr(error, "code", None) not in _FULL:
                self._telemetry.copied("span", 0, ok=False)
            for span in spans[:1]:  # an answer may be missing
                await asyncio.shield(told(taker, AbortMigration(*span.key, name)))
            raise
        finally:
            for span in spans[:1]:  # all that is offered under this name ends
                await asyncio.shield(told(giver, AbortMigration(*span.key, name)))

    def _let_moves_go_first(self) -> None:
        if not self._migrations.is_idle:
            message = "an agent is on the move"
            raise _MovesGoFirstError(message)


async def take_back(fleet: Fleet, key: AgentKey) -> None:
    """Have nodes let go of what they borrowed of an agent; of who does not hear, the lease ends."""
    members = [m for m in fleet.membership.members if fleet.is_alive(m.name)]
    await asyncio.gather(*(told(member.link, ReturnSpans(*key)) for member in members))
