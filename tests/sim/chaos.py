"""What goes wrong, when, and for how long: drawn from the seed, healed at the end."""

import asyncio

from fabric.control import Done, Flush
from fabric.errors import FabricError
from fabric.generation import IdentityKind
from tests.sim.network import Weather
from tests.sim.router_host import ROUTER

BEGIN_S, END_S = 3.0, 16.0
DISK_CODES = {"disk_error", "disk_budget", "corrupt_data"}


class Chaos:
    """The faults and the operator's doings of one run."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("chaos")
        self.has_faults = False

    async def run(self):
        random = self._random
        kinds = [
            self._crash, self._crash_in_write, self._hang, self._cut, self._router_crash,
            self._disk_full, self._disk_errors, self._damage, self._restart, self._router_hang,
        ]  # fmt: skip
        faults = [random.choice(kinds) for _ in range(random.randrange(5))]
        deeds = [self._migrate] * random.randrange(1, 8) + [self._flush] * random.randrange(3)
        if random.random() < 0.5:
            self._world.network.weather = Weather(
                late_odds=random.choice([0.0, 0.02, 0.1]),
                late_s=random.choice([0.5, 5.0, 15.0]),
                loss_odds=random.choice([0.0, 0.01, 0.05]),
                double_odds=random.choice([0.0, 0.05, 0.2]),
            )
        self.has_faults = bool(faults) or self._world.network.is_bad
        await asyncio.gather(*(self._at_some_time(each) for each in (*faults, *deeds)))
        self._world.network.weather = Weather()
        for host in self._world.nodes.values():
            host.platter.crash_in = None
        hosts = [*self._world.nodes.values(), self._world.router]
        while not all(host.is_serving for host in hosts):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.5)

    async def _at_some_time(self, work):
        await asyncio.sleep(BEGIN_S + (END_S - BEGIN_S) * self._random.random())
        await work()

    def _some_node(self):
        return self._random.choice(list(self._world.nodes.values()))

    def _is_well(self, host):
        return not (host.process.is_dead or host.process.is_frozen)

    # --- faults ------------------------------------------------------------------------------

    async def _crash(self):
        host = self._some_node()
        if self._is_well(host):
            self._world.note(f"kill {host.name}")
            host.kill()

    async def _router_crash(self):
        if self._is_well(self._world.router):
            self._world.router.kill()

    def boot_later(self, host):
        """Start a dead process again, some time."""
        delay_s = self._random.choice([0.2, 2.0, 9.0]) * self._random.random()
        self._world.network.later(delay_s, host.boot)

    async def _crash_in_write(self):
        host = self._some_node()
        if self._is_well(host):
            host.platter.crash_in = self._random.randrange(1, 12)
            self._world.note(f"{host.name} will die in its write number {host.platter.crash_in}")

    async def _restart(self):
        host = self._some_node()
        if self._is_well(host) and host.is_serving:
            self._world.note(f"stop {host.name}")
            process = host.process
            stopping = self._world.loop.spawn(process, host.stop_well())
            await asyncio.wait({stopping}, timeout=8.0)
            if host.process is process:
                host.kill()

    async def _hang(self):
        await self._freeze(self._some_node())

    async def _router_hang(self):
        await self._freeze(self._world.router)

    async def _freeze(self, host):
        if self._is_well(host):
            process = host.process
            self._world.note(f"hang {host.name}")
            host.freeze()
            await asyncio.sleep(self._random.choice([1.0, 5.0, 12.0]) * self._random.random())
            self._world.note(f"{host.name} goes on")
            self._world.loop.thaw(process)

    async def _cut(self):
        names = [*self._world.nodes, ROUTER]
        one, other = self._random.sample(names, 2)
        ways = [(one, other)] if self._random.random() < 0.5 else [(one, other), (other, one)]
        self._world.note(f"cut {ways}")
        for way in ways:
            self._world.network.cut(*way)
        await asyncio.sleep(self._random.choice([1.0, 4.0, 10.0]) * self._random.random())
        self._world.note(f"heal {ways}")
        for way in ways:
            self._world.network.cut(*way, change=-1)

    async def _disk_full(self):
        platter = self._some_node().platter
        self._world.note("a disk is full")
        platter.is_full = True
        await asyncio.sleep(6.0 * self._random.random())
        platter.is_full = False

    async def _disk_errors(self):
        platter = self._some_node().platter
        self._world.note("a disk fails now and then")
        platter.error_odds, platter.has_failed = 0.2, True
        await asyncio.sleep(6.0 * self._random.random())
        platter.error_odds = 0.0

    async def _damage(self):
        host = self._some_node()
        self._world.note(f"{host.name}: damaged {host.platter.damage()}")

    # --- deeds -------------------------------------------------------------------------------

    async def _migrate(self):
        named = [t for t in self._world.clients.talks if t.identity.kind is IdentityKind.AGENT]
        if not named:
            return
        talk, host = self._random.choice(named), self._some_node()
        await self._in_router(
            f"move {talk.name} to {host.name}",
            lambda services: services.migrations.migrate(*talk.key, host.name),
        )

    async def _flush(self):
        host, drop_hot = self._some_node(), self._random.random() < 0.7
        await self._in_router(
            f"flush {host.name}",
            lambda services: services.fleet.link(host.name).call(Flush(drop_hot), Done),
        )

    async def _in_router(self, what, work):
        """Have the router do something, as an operator's request would."""
        router = self._world.router
        if router.services is None:
            return
        self._world.note(what)
        task = self._world.loop.spawn(router.process, work(router.services))
        await asyncio.wait({task}, timeout=60.0)
        if not task.done():
            return
        try:
            task.result()
        except FabricError as error:
            self._world.note(f"{what}: {error.status} {error.code}")
            is_refusal = int(error.status) in (409, 404, 421, 429, 503)
            if not is_refusal and error.code not in DISK_CODES:
                self._world.fail(f"{what}: {error.status} {error.code}: {error.message}")
        else:
            self._world.note(f"{what}: done")
