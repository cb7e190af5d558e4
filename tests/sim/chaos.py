"""Faults, their times and their durations, drawn from the seed and healed at the end."""

import asyncio

from node.store.block_files import file_name
from tests.sim.disk import PointFault
from tests.sim.network import Weather
from tests.sim.operator_actions import OperatorActions
from tests.sim.router_host import ROUTER

BEGIN_S, END_S = 3.0, 16.0
EDIT_POLLS = 80  # every half second, for an edited record
REFUSED_POLLS = 20  # every half second, for an unsaved turn
ACKNOWLEDGED_S = 10.0  # by then most clients have an answer
JOINS_S_MAX = 60.0  # after the router, if all start together
STOPPED_S = 30.0  # by then a stopping node has saved everything


class Chaos:
    """The faults and operator actions of one run."""

    def __init__(self, world):
        self._world = world
        self._random = world.stream("chaos")
        self.actions = OperatorActions(world)
        self.has_faults = False
        self.was_network_bad = False
        self._boots_at_once = False
        self._is_cut = False  # during a power cut, which restarts the processes itself

    async def run(self):
        random = self._random
        kinds = [
            self._crash, self._crash_in_write, self._hang, self._cut, self._router_crash,
            self._disk_full, self._disk_errors, self._damage, self._restart, self._router_hang,
            self._point_fault, self._point_fault, self._slow_disk, self._router_stop,
        ]  # fmt: skip
        faults = [random.choice(kinds) for _ in range(random.choice([0, 1, 2, 3, 4, 8]))]
        if self._world.is_slow:
            faults = [*faults[:1], self._drop_requests, self._drop_requests]
        if self._world.has_power_cuts:
            faults = [*faults[:2], self._power_cut, self._power_cut]
        if self._world.has_standby:
            kinds = [self._router_crash, self._router_hang, self._router_cut]
            faults = [*faults[:2], *(random.choice(kinds) for _ in range(2))]
            faults += [self._restart_a_voter] * 2
        if self._world.has_slow_links:
            faults += [self._router_stop, self._router_stop]
        actions = self.actions.draw()
        if self._world.edits.is_pressed:
            faults += [self._refuse_an_edit] * 3 + [self._lose_an_edit] * 3
        if random.random() < 0.5:
            self._world.network.weather = Weather(
                late_odds=random.choice([0.0, 0.02, 0.1]),
                late_s=random.choice([0.5, 5.0, 15.0]),
                loss_odds=random.choice([0.0, 0.01, 0.05]),
                double_odds=random.choice([0.0, 0.05, 0.2]),
            )
        elif self._world.has_standby:  # late calls of routers whose term has ended
            self._world.network.weather = Weather(late_odds=0.1, late_s=15.0, double_odds=0.05)
        self.was_network_bad = self._world.network.is_bad
        self.has_faults = bool(faults) or self.was_network_bad
        await asyncio.gather(*(self._at_some_time(each) for each in (*faults, *actions)))
        self._world.network.weather = Weather()
        for host in self._world.nodes.values():
            host.drive.crash_in = host.drive.fault = None
        hosts = [*self._world.nodes.values(), *self._world.router.hosts]
        while not all(host.is_serving for host in hosts):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.5)

    async def _at_some_time(self, work):
        await asyncio.sleep(BEGIN_S + (END_S - BEGIN_S) * self._random.random())
        await work()

    def _choose_node(self):
        return self._random.choice(list(self._world.nodes.values()))

    def _is_well(self, host):
        return not (host.process.is_dead or host.process.is_frozen)

    # --- faults ------------------------------------------------------------------------------

    async def _crash(self):
        host = self._choose_node()
        if self._is_well(host):
            self._world.note(f"kill {host.name}")
            host.kill()

    async def _router_crash(self):
        if self._is_well(self._world.router):
            self._world.router.kill()

    async def _router_stop(self):
        """Stop the router in the middle of a migration."""
        router = self._world.router
        moving = asyncio.create_task(self.actions.move_some_agent())
        await asyncio.sleep((2.0 if self._world.has_slow_links else 0.05) * self._random.random())
        if self._is_well(router) and router.is_serving:
            self._world.note("stop the router")
            self._world.watch.on_trouble(ROUTER)
            await router.stop_cleanly()
        await moving

    def boot_later(self, host):
        """Schedule the restart of a dead process."""
        if self._is_cut:
            return
        delay_s = self._random.choice([0.2, 2.0, 9.0]) * self._random.random()
        if self._boots_at_once:
            delay_s = 0.01
        self._world.network.schedule(delay_s, host.boot)

    async def _power_cut(self):
        await asyncio.sleep(ACKNOWLEDGED_S + 20.0 * self._random.random())
        self.cut_power(self._random)

    def cut_power(self, random):
        """End every process; the routers start first, and each node joins within a minute."""
        self._world.note("the power is cut")
        hosts = [host for host in self._world.nodes.values() if self._is_well(host)]
        self._is_cut = True
        boots = [router for router in self._world.router.hosts if self._is_well(router)]
        for host in (*boots, *hosts):
            host.kill()
        self._is_cut = False
        router_s = random.random()
        for host in boots:
            self._world.network.schedule(router_s, host.boot)
        for host in hosts:
            host.is_listed = False
            delay_s = random.choice([0.0, 3.0, 8.0, JOINS_S_MAX]) * random.random()
            self._world.network.schedule(router_s + delay_s, host.boot)

    async def _crash_in_write(self):
        host = self._choose_node()
        if self._is_well(host):
            host.drive.crash_in = self._random.randrange(1, 12)
            self._world.note(f"{host.name} will die in write {host.drive.crash_in}")

    async def _restart(self):
        host = self._choose_node()
        if self._is_well(host) and host.is_serving:
            self._world.note(f"stop {host.name}")
            process = host.process
            stopping = self._world.loop.spawn(process, host.stop_cleanly())
            await asyncio.wait({stopping}, timeout=STOPPED_S)
            is_over = host.process is not process or process.is_dead or stopping.done()
            if not is_over and not process.is_frozen:
                self._world.fail(f"{host.name} does not stop")
            if host.process is process:
                host.kill()

    async def _hang(self):
        await self._freeze(self._choose_node())

    async def _router_hang(self):
        await self._freeze(self._world.router)

    async def _router_cut(self):
        """Cut the active router off from all nodes, or from all but one."""
        host, nodes = self._world.router.host, list(self._world.nodes)
        cut = nodes if self._random.random() < 0.5 else self._random.sample(nodes, len(nodes) - 1)
        ways = [way for name in cut for way in ((host.name, name), (name, host.name))]
        self._world.note(f"cut {host.name} off from {cut}")
        self._note_trouble(ROUTER, *cut, change=1)
        for way in ways:
            self._world.network.cut(*way)
        await asyncio.sleep(self._random.choice([2.0, 6.0, 12.0]) * self._random.random())
        self._world.note(f"heal {host.name}")
        for way in ways:
            self._world.network.cut(*way, change=-1)
        self._note_trouble(ROUTER, *cut, change=-1)

    async def _restart_a_voter(self):
        """Restart a node within its lease, while another is cut off from the active router."""
        router, nodes = self._world.router.host, list(self._world.nodes.values())
        isolated, voter = self._random.sample(nodes, 2)
        ways = [(router.name, isolated.name), (isolated.name, router.name)]
        self._world.note(f"cut {router.name} off from {isolated.name}, and restart {voter.name}")
        self._note_trouble(ROUTER, isolated.name, change=1)
        for way in ways:
            self._world.network.cut(*way)
        await asyncio.sleep(3.5)  # longer than the lease of the isolated node
        if self._is_well(voter):
            self._boots_at_once = True
            voter.kill()
            self._boots_at_once = False
        await asyncio.sleep(3.0)
        for way in ways:
            self._world.network.cut(*way, change=-1)
        self._note_trouble(ROUTER, isolated.name, change=-1)

    async def _freeze(self, host):
        if self._is_well(host):
            process = host.process
            self._world.note(f"hang {host.name}")
            host.freeze()
            await asyncio.sleep(self._random.choice([1.0, 5.0, 12.0]) * self._random.random())
            self._world.note(f"{host.name} resumes")
            self._note_trouble(host.name)
            self._world.loop.thaw(process)

    async def _cut(self):
        names = [*self._world.nodes, ROUTER]
        one, other = self._random.sample(names, 2)
        ways = [(one, other)] if self._random.random() < 0.5 else [(one, other), (other, one)]
        self._world.note(f"cut {ways}")
        self._note_trouble(one, other, change=1)
        for way in ways:
            self._world.network.cut(*way)
        await asyncio.sleep(self._random.choice([1.0, 4.0, 10.0]) * self._random.random())
        self._world.note(f"heal {ways}")
        for way in ways:
            self._world.network.cut(*way, change=-1)
        self._note_trouble(one, other, change=-1)

    async def _drop_requests(self):
        """Drop the router's requests to a node; its replies still arrive."""
        host, key = self._choose_node(), self._world.clients.talks[0].key
        for _ in range(40):
            running = [each for each in self._world.nodes.values() if _is_running(each, key)]
            if running:
                host = running[0]
                break
            await asyncio.sleep(0.25)
        way = (ROUTER, host.name)
        self._world.note(f"cut {way}")
        self._note_trouble(host.name, change=1)
        self._world.network.cut(*way)
        await asyncio.sleep(15.0 + 4.0 * self._random.random())
        self._world.note(f"heal {way}")
        self._world.network.cut(*way, change=-1)
        self._note_trouble(host.name, change=-1)

    def _note_trouble(self, *names, change=0):
        for name in names:
            self._world.watch.on_trouble(name, change)

    async def _disk_full(self):
        drive = self._choose_node().drive
        self._world.note("a disk is full")
        drive.is_full = drive.has_been_full = True
        await asyncio.sleep(6.0 * self._random.random())
        drive.is_full = False

    async def _disk_errors(self):
        drive = self._choose_node().drive
        self._world.note("a disk fails now and then")
        drive.error_odds, drive.has_failed = 0.2, True
        drive.is_sticky = self._random.random() < 0.3
        await asyncio.sleep(6.0 * self._random.random())
        drive.error_odds, drive.is_sticky = 0.0, False

    async def _damage(self):
        host = self._choose_node()
        self._world.note(f"{host.name}: damaged {self._hurt(host)}")

    def _hurt(self, host, name="blocks/"):
        """Damage a file, and record the agents that use it."""
        records = self._world.disk_judge.records(host.name)
        name = host.drive.damage(name)
        for key, record in records.items():
            if name in map(file_name, record.refs):
                self._world.watch.note_hurt(key)
        return name

    async def _lose_an_edit(self):
        """Damage a block of an edited record, scrub the node, and have the record repaired."""
        host, agent = await self._find_edited_agent()
        if host is None:
            return
        blocks = agent.saved.pieces.blocks
        await self.lose_block(host, agent, blocks[-1] if self._random.random() < 0.7 else blocks[0])

    async def lose_block(self, host, agent, block):
        """Damage a block of an agent, scrub the node, and have the record repaired."""
        name = self._hurt(host, file_name(block))
        self._world.note(f"{host.name}: damaged {name} of {agent.key}")
        await self.actions.scrub(host)
        await self.actions.pin(agent.key)
        self._world.invariants.check_names(host)

    async def _refuse_an_edit(self):
        """Fill a disk until a turn of an agent with edited memory stays unsaved."""
        host, agent = await self._find_edited_agent()
        if host is None:
            return
        self._world.note(f"{host.name}: full until {agent.key} is in memory only")
        host.drive.is_full = host.drive.has_been_full = True
        for _ in range(REFUSED_POLLS):
            if agent.is_unsaved:
                break
            await asyncio.sleep(0.5)
        host.drive.is_full = False

    async def _find_edited_agent(self):
        """Wait for an agent whose record was edited; return its host and the agent."""
        for _ in range(EDIT_POLLS):
            hosts = [host for host in self._world.nodes.values() if self._is_well(host)]
            edited = [(host, agent) for host in hosts for agent in _edited(host)]
            if edited:
                return self._random.choice(edited)
            await asyncio.sleep(0.5)
        return None, None

    async def _slow_disk(self):
        drive = self._choose_node().drive
        self._world.note("a disk is slow")
        drive.slow_s = self._random.choice([0.01, 0.1, 0.5])
        await asyncio.sleep(6.0 * self._random.random())
        drive.slow_s = 0.0

    async def _point_fault(self):
        """Fail one write; later the node may restart from its disk."""
        host, random = self._choose_node(), self._random
        host.drive.fault = PointFault(random.randrange(12), random.random() < 0.7)
        await asyncio.sleep(random.choice([1.0, 4.0]) * random.random())
        fault = host.drive.fault
        if fault is not None and fault.name is not None:
            self._world.note(f"{host.name} failed to write {fault.name}, {fault.is_in_place=}")
            if self._is_well(host) and random.random() < 0.7:
                host.kill()
        host.drive.fault = None


def _edited(host):
    """List a node's agents whose records were edited."""
    agents = host.node.resources.table if host.node is not None else ()
    return [each for each in agents if each.saved is not None and each.saved.edited is not None]


def _is_running(host, key):
    agent = host.node.resources.table.get(key) if host.node is not None else None
    return agent is not None and agent.turn is not None and not agent.waiting_count
