"""Random requests of operators and clients, other than turns."""

import asyncio
from contextlib import suppress

from fabric.control.node_calls import AgentView, Done, Flush, PinAgent
from fabric.ids import AgentId, OperationId
from fabric.record.hibernation_file import peek_header
from fabric.turn.generation import IdentityKind
from router.moves.drains import DrainState
from router.moves.hibernations import ResumeOptions, Upload
from tests.sim.disk import PointFault
from tests.sim.router_host import ROUTER
from tests.sim.router_requests import ANSWER_S, DAMAGE_CODES, RouterRequests

DRAINED_S = 40.0
ALL_BYTES = 1 << 40


class OperatorActions:
    """Actions on a fabric from outside, other than faults and turns."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("deeds")
        self._in_router = RouterRequests(world).in_router
        self.files = []  # hibernated agents

    def draw(self):
        """Choose the actions of this life."""
        random = self._random
        kinds = [self._migrate] * 6 + [
            self._migrate_badly, self._migrate_badly, self._flush, self._fork, self._replicate,
            self._drain, self._pin, self._prefetch, self._hibernate, self._scrub,
        ]  # fmt: skip
        actions = [random.choice(kinds) for _ in range(random.randrange(1, 10))]
        if self._world.is_crowded:
            actions += [self._prefetch_all] * 4
        if self._world.has_failing_writes:
            actions += [self._migrate_badly] * 8
        return actions

    def ask(self, what, work):
        """Send the router a request about an agent, which may fail on damage."""
        return self._in_router(what, work, meets_damage=True)

    def _some_host(self):
        return self._random.choice(list(self._world.nodes.values()))

    def _named_talks(self):
        talks = self._world.clients.talks
        return [talk for talk in talks if talk.identity.kind is IdentityKind.AGENT]

    def _some_talk(self):
        named = self._named_talks()
        return self._random.choice(named) if named else None

    # --- actions -----------------------------------------------------------------------------

    async def move_some_agent(self):
        """Move a random agent to a random node."""
        await self._migrate()

    async def _migrate(self, host=None):
        talk, host = self._some_talk(), host or self._some_host()
        if talk is not None:
            await self._in_router(
                f"move {talk.name} to {host.name}",
                lambda services: services.moves.migrate(*talk.key, host.name),
                meets_damage=True,
            )

    async def _migrate_badly(self):
        """Move an agent while a write of a record fails, at the source or the target."""
        host = self._some_host()
        is_target = self._random.random() < 0.7
        if host.drive.fault is None:
            self._world.chaos.has_faults = True
            number, in_place = self._random.choice([0, 0, 1, 2]), self._random.random() < 0.8
            host.drive.fault = PointFault(number, in_place, "manifests/")
        await self._migrate(host if is_target else None)
        await asyncio.sleep(5.0 * self._random.random())
        fault, host.drive.fault = host.drive.fault, None
        if fault is not None and fault.name is not None:
            self._world.note(f"{host.name} failed to write {fault.name}, {fault.is_in_place=}")
            if self._random.random() < 0.7 and not (host.process.is_dead or host.process.is_frozen):
                host.kill()

    async def _flush(self):
        host, drop_hot = self._some_host(), self._random.random() < 0.7
        await self._in_router(
            f"flush {host.name}",
            lambda services: services.fleet.link(host.name).call(Flush(drop_hot), Done),
        )

    async def _fork(self):
        talk = self._some_talk()
        if talk is None:
            return
        talk.begin_copy()
        name = AgentId(f"fork-{self._random.randrange(10**6)}")
        to = self._random.choice([None, *self._world.nodes])
        operation = OperationId(f"op-{self._random.randrange(10**12):012}")
        done = await self._in_router(
            f"fork {talk.name} as {name} to {to}",
            lambda services: services.forks.fork(talk.key, name, to, operation),
            meets_damage=True,
        )
        if done.is_over:
            talk.end_copy()

    async def _replicate(self):
        talk, host = self._some_talk(), self._some_host()
        kept = self._random.choice([True, False, None])
        if talk is not None:
            await self._in_router(
                f"replicate {talk.name} to {host.name}",
                lambda services: services.replicas.replicate(talk.key, host.name, kept=kept),
                meets_damage=True,
            )

    async def _pin(self):
        talk, pinned = self._some_talk(), self._random.random() < 0.7
        if talk is not None:
            await self.pin(talk.key, is_pinned=pinned)

    async def pin(self, key, *, is_pinned=True):
        """Pin or unpin an agent, which also repairs its record."""

        async def pin(services):
            owner = services.fleet.directory.owner(key)
            if owner is not None:
                await services.fleet.link(owner.node).call(PinAgent(*key, is_pinned), AgentView)

        await self._in_router(f"pin {'/'.join(key)} {is_pinned}", pin)

    async def _prefetch_all(self):
        """Prefetch all named agents at once."""
        await asyncio.gather(*(self._prefetch(talk) for talk in self._named_talks()))

    async def _prefetch(self, talk=None):
        talk = talk or self._some_talk()
        if talk is not None:
            await self._in_router(
                f"prefetch {talk.name}",
                lambda services: services.prefetches.load(talk.key),
                meets_damage=True,
            )

    async def _scrub(self):
        await self.scrub(self._some_host())

    async def scrub(self, host):
        """Have a node verify all its blocks."""
        node, process = host.node, host.process
        if node is not None and not process.is_frozen:
            self._world.note(f"{host.name}: scrub")
            blocks = node.resources.store.blocks
            work = node.resources.workers.run(lambda: blocks.scrub(ALL_BYTES))
            task = self._world.loop.spawn(process, work)
            await asyncio.wait({task}, timeout=ANSWER_S)

    async def _drain(self):
        host, since_s = self._some_host(), self._world.loop.now_s
        drain_request = await self.begin_drain(host)
        if drain_request.result is not None:
            await self._watch_drain(host, since_s)
        while not await self.undrain(host):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.5)

    async def begin_drain(self, host):
        """Start the drain of a node."""
        return await self._in_router(
            f"drain {host.name}", lambda services: services.drains.start(host.name)
        )

    async def _watch_drain(self, host, since_s):
        """Check a drain: without other faults all agents leave."""
        world, drain = self._world, None
        for _ in range(int(2 * self._random.choice([0.5, 3.0, DRAINED_S]))):
            await asyncio.sleep(0.5)
            services = world.router.services
            drain = services.drains.find(host.name) if services is not None else None
            if drain is None or drain.state is DrainState.DRAINED:
                return
        hosts = [*world.nodes, ROUTER]
        is_well = all(world.watch.was_well_since(name, since_s) for name in hosts)
        is_well = is_well and all(h.drive.is_well for h in world.nodes.values())
        if world.loop.now_s - since_s < DRAINED_S or not is_well or world.chaos.was_network_bad:
            return
        for key, why in drain.stuck.items():
            if why.code in DAMAGE_CODES | {"agent_changing"}:
                world.fail(f"{host.name} does not release {key}: {why.code}: {why.message}")

    async def undrain(self, host):
        """End the drain of a node; return whether that is certain."""
        outcome = await self._in_router(
            f"undrain {host.name}", lambda services: services.drains.stop(host.name)
        )
        return outcome.is_over and outcome.error is None

    async def _hibernate(self):
        """Hibernate an agent into a file, and resume it under another name."""
        talk = self._some_talk()
        if talk is None:
            return
        talk.begin_copy()
        name = AgentId(f"file-{self._random.randrange(10**6)}")
        resumed = await self.copy_by_file(talk.key, name)
        if resumed is None or resumed.is_over:
            talk.end_copy()

    async def copy_by_file(self, key, name):
        """Copy an agent through a file; return the outcome, None if the resume did not begin."""
        host = self._world.router

        async def hibernate(_):
            _, response = await host.hibernations.hibernate(key, None, b"")
            async with response:
                with suppress(ConnectionResetError):  # its node died
                    return b"".join([part async for part in response.content.iter_any()])
            return None

        done = await self._in_router(f"hibernate {'/'.join(key)}", hibernate, meets_damage=True)
        if not done.result:
            return None
        raw = done.result
        header = peek_header(raw)
        if header is None:
            return None

        async def rest():
            for start in range(0, len(raw), 4_096):
                yield raw[start : start + 4_096]

        expected = ResumeOptions((key[0], name))
        return await self._in_router(
            f"resume {'/'.join(key)} as {name}",
            lambda _: host.hibernations.resume(expected, header, Upload(b"", rest())),
            may_be_cut=True,
        )
