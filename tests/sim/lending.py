"""Lenders that are erased, or private again, soon after others have borrowed of them.

Meanwhile what was borrowed goes further: by moves, replicas, forks and files, and restarts.
"""

import contextlib

from fabric.ids import AgentId, OperationId
from fabric.turn.generation import IdentityKind

SPREAD_ODDS, TAKEN_BACK_ODDS, ERASE_ODDS = 0.6, 0.8, 0.5


class Lending:
    """Loans of one run, with their own random stream."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("lending")
        self._due = set()  # talks whose agents are to be erased
        self.taken_back_count = 0

    def is_due(self, talk):
        """Say whether a talk's agent is to be erased now."""
        is_due = talk in self._due
        self._due.discard(talk)
        return is_due

    async def act(self, talk):
        """Spread what others have borrowed of a talk's agent, and take it back."""
        random = self._random
        is_named = talk.identity.kind is IdentityKind.AGENT and not talk.is_shared
        if talk.acked is None or talk.attempts or not is_named:
            return
        borrowers = self._world.lineage.new_borrowers(talk.key)
        if not borrowers:
            return
        if random.random() < SPREAD_ODDS:
            ways = [self._move, self._replicate, self._fork, self._file, self._kill]
            await random.choice(ways)(random.choice(borrowers))
        if random.random() >= TAKEN_BACK_ODDS:
            return
        self.taken_back_count += 1
        if random.random() < ERASE_ODDS:
            self._due.add(talk)
        else:
            await self._world.directing.verbs.share(talk, "agent")

    # --- further -----------------------------------------------------------------------------

    async def _move(self, key):
        name = self._random.choice(list(self._world.nodes))
        await self._ask(
            f"move {'/'.join(key)} to {name}",
            lambda services: services.migrations.migrate(*key, name),
        )

    async def _replicate(self, key):
        name, kept = self._random.choice(list(self._world.nodes)), self._random.random() < 0.5
        await self._ask(
            f"replicate {'/'.join(key)} to {name}",
            lambda services: services.replicas.replicate(key, name, kept=kept),
        )

    async def _fork(self, key):
        random = self._random
        name = AgentId(f"loan-{random.randrange(10**6)}")
        to = random.choice([None, *self._world.nodes])
        operation = OperationId(f"op-{random.randrange(10**12):012}")
        with self._copying(key):
            await self._ask(
                f"fork {'/'.join(key)} as {name} to {to}",
                lambda services: services.forks.fork(key, name, to, operation),
            )

    async def _file(self, key):
        with self._copying(key):
            name = AgentId(f"loan-{self._random.randrange(10**6)}")
            await self._world.chaos.deeds.copy_by_file(key, name)

    @contextlib.contextmanager
    def _copying(self, key):
        """Mark all talks of an agent as copied."""
        for talk in self._world.clients.talks:
            if talk.key == key:
                talk.begin_copy()
        yield

    async def _kill(self, key):
        services = self._world.router.services
        owner = services.fleet.directory.owner(key) if services is not None else None
        host = self._world.nodes[owner.node] if owner is not None else None
        if host is not None and host.is_serving and not host.process.is_frozen:
            host.kill()

    def _ask(self, what, work):
        return self._world.chaos.deeds.ask(what, work)
