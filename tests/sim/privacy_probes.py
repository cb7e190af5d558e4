"""Agents that send a private agent's text, to see whether they receive its cache.

They must compute every row that only it has, also on a node that it is just moving to.
"""

import asyncio

from fabric.ids import AgentId
from fabric.turn.generation import Identity, IdentityKind, Sampling

PROBE_ODDS, CROWD_ODDS, DRAIN_ODDS = 0.8, 0.5, 0.8
LOOK_S, LOOKS_MAX = 0.002, 500  # polls for blocks at the target of its move


class PrivacyProbes:
    """The probes of one run, with their own random stream."""

    def __init__(self, world, verbs):
        self._world = world
        self._verbs = verbs
        self._random = world.stream("mimics")
        self._is_draining = False  # one at a time: some node must take the probes

    async def act(self, talk):
        """Now and then send the text of a private agent, perhaps while its node drains."""
        random = self._random
        if not self._verbs.is_private(talk.key) or talk.attempts or talk.acked is None:
            return
        if random.random() >= PROBE_ODDS:
            return
        if random.random() < CROWD_ODDS:
            await self._crowd(talk)
        actions, host = self._world.chaos.actions, None
        if random.random() < DRAIN_ODDS and not self._is_draining:
            self._is_draining = True
            host = self._world.nodes[talk.acked.node]
            await actions.begin_drain(host)
            await self._await_blocks(talk)
        talk.begin_copy()
        try:
            await self._probe(talk)
        finally:
            talk.end_copy()
        if host is None:
            return
        while not await actions.undrain(host):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.5)
        self._is_draining = False

    async def _crowd(self, talk):
        """Send one probe per node at once, so that the router spreads them."""
        talk.begin_copy()
        try:
            await asyncio.gather(*(self._probe(talk) for _ in self._world.nodes))
        finally:
            talk.end_copy()

    async def _await_blocks(self, talk):
        for _ in range(LOOKS_MAX):
            nodes = [host.node for host in self._world.nodes.values() if host.node is not None]
            if any(
                move.key == talk.key and move.refs for node in nodes for move in node.moves.incoming
            ):
                return
            await asyncio.sleep(LOOK_S)

    async def _probe(self, talk):
        name = AgentId(f"mimic-{self._random.randrange(10**6)}")
        identity = Identity(IdentityKind.AGENT, name)
        probe = type(talk)(talk.tenant, identity, self._random, talk.number)
        probe.lives_count = talk.lives_count
        probe.messages = [*talk.messages, {"role": "user", "content": probe.say()}]
        self._world.note(f"{talk.name}: {name} sends the same")
        await self._world.clients.take_turn(probe, Sampling(max_tokens=8))
