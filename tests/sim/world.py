"""One simulated fabric: its clock, network, Macs and clients, all from one seed."""

import asyncio
import contextlib
import gc
import logging
import traceback
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from unittest import mock

from fabric.ids import SELF_TEST_TENANT
from fabric.settings import NodeSettings
from node import drain_flag
from node.limits import FLUSH_IDLE_S, RECLAIM_EVERY_S
from node.migration.incoming_cleanup import STALE_S
from node.mlx.device import DeviceError
from node.store import granted_terms
from node.store.posix_disk import PosixDisk
from router import prompt
from router.placement import head_lenders
from tests.sim import random_streams
from tests.sim.chaos import Chaos
from tests.sim.clients import Clients
from tests.sim.directing import Directing
from tests.sim.disk_judge import DiskJudge
from tests.sim.edits import Edits
from tests.sim.invariants import Invariants
from tests.sim.lending import Lending
from tests.sim.lineage import Lineage
from tests.sim.loop import PROCESS, SimLoop, StuckError
from tests.sim.model import KINDS
from tests.sim.network import Network
from tests.sim.node_host import STATES, NodeHost
from tests.sim.owner_wait_judge import OwnerWaitJudge
from tests.sim.readers import Readers
from tests.sim.reuse_judge import ReuseJudge
from tests.sim.router_host import RouterHost
from tests.sim.router_pair import RouterPair
from tests.sim.talk import MARKER
from tests.sim.term_judge import TermJudge
from tests.sim.watch import Watch
from tests.sim.workers import Worker, simulated_locks, unwind
from tests.support.incoming import pinned_blocks

NODES = ("node-a", "node-b", "node-c")
LIMIT_S = 600.0  # of simulated time without any answer, which means a hang
QUIET_S = FLUSH_IDLE_S + 5.0
IDLE_S = 3  # without a move or copy: none is due then
SAVE_POLLS = 20  # of a tenth of a second: no save takes that long
SELF_TEST_POLLS = 100
KIB, MIB = 1 << 10, 1 << 20
CROWD_ODDS, CROWD = 0.1, 14  # clients at once, with memory for two or three
FAILING_WRITE_ODDS = 0.1  # disks fail while agents move
SLOW_LINK_ODDS = 0.15  # copies take seconds, and much happens meanwhile
LOW_MEMORY_ODDS = 0.1  # machines are short of memory now and then
FAULTY_ODDS = 0.15  # the device that computes fails now and then
DEVICE_FAILURE_CHANCE = 0.01  # per chunk or step of such a device
POWER_CUT_ODDS = 0.15  # all processes lose power at once, and prompts take seconds to compute


@dataclass(eq=False)
class World:
    """The complete state of one run."""

    seed: int
    loop: SimLoop
    network: Network = field(init=False)
    nodes: dict = field(default_factory=dict)
    router: RouterHost = field(init=False)
    clients: Clients = field(init=False)
    invariants: Invariants = field(init=False)
    trace: list = field(default_factory=list)
    violation: str | None = None
    is_verbose: bool = False
    router_lives: int = 0
    has_standby: bool = False  # there are two routers, of which the nodes choose one
    dead_processes: list = field(default_factory=list)  # kept, as destructors run at random times

    lends_heads = False  # even short ones; simulated prompts are short

    def __post_init__(self):
        self.network = Network(self.loop, self.stream("network"))
        shape = self.stream("shape")
        self.settings = NodeSettings(
            hot_bytes=shape.choice([32 * 1024, 64 * 1024, MIB]),
            disk_bytes=shape.choice([512 * 1024, MIB, 64 * MIB, 64 * MIB]),
            active_max=shape.choice([2, 8]),
        )
        self.kind = KINDS[shape.choice([*KINDS, "full"])]
        self.talks_count = shape.choice([4, 4, 4, 8])
        self.has_twin = shape.random() < 0.25
        self.is_slow = self.has_twin and shape.random() < 0.7  # answers outlast leases
        self.is_rhythmic = shape.random() < 0.25
        self.uses_http = shape.random() < 0.5
        self.replicas = shape.choice([0, 0, 0, 1])
        # Otherwise a new router expects only the nodes of its stored roster.
        self.counts_nodes = self.stream("configuration").random() < 0.5
        self.moves_agents = self.stream("stay or move").random() < 0.5  # by the router's decision
        if shape.random() < 0.5:
            self.loop.start_worker = self._start_worker
        self.speeds = [500, 2_000, 8_000]
        self._press(self.stream("pressure"))
        self.lineage = Lineage(self)
        self.lending = Lending(self)
        self.readers = Readers(self)
        self.edits = Edits(self, self.stream("edits"))
        self.directing = Directing(self, self.stream("directing"))
        self.watch = Watch(self)
        self.disk_judge = DiskJudge(self)
        self.reuse_judge = ReuseJudge(self)
        self.owner_wait_judge = OwnerWaitJudge(self)
        for name in NODES:
            speed = shape.choice(self.speeds)
            self.nodes[name] = NodeHost(self, name, replace(self.settings), speed)
        self.router = RouterPair(self) if self.has_standby else RouterHost(self)
        self.term_judge = TermJudge(self)
        self.clients = Clients(self)
        self.invariants = Invariants(self)
        self.chaos = Chaos(self)

    def _press(self, random):
        """Draw the pressure on this life, such as crowds, slow links and little memory."""
        self.is_crowded = random.random() < CROWD_ODDS
        self.has_slow_links = random.random() < SLOW_LINK_ODDS
        self.has_failing_writes = random.random() < FAILING_WRITE_ODDS
        if self.is_crowded:
            self.settings = replace(self.settings, hot_bytes=12 * KIB, active_max=8)
            self.talks_count, self.is_rhythmic, self.speeds = CROWD, True, [500]
            self.is_slow = False  # else no turn would end
        is_faulty = self.stream("device").random() < FAULTY_ODDS
        self.device_failure_chance = DEVICE_FAILURE_CHANCE if is_faulty else 0.0
        self.is_low_on_memory = self.stream("memory").random() < LOW_MEMORY_ODDS
        self.has_power_cuts = self.stream("power cut").random() < POWER_CUT_ODDS
        if self.has_power_cuts:
            self.speeds, self.is_slow, self.talks_count = [100], False, 8
        if self.has_slow_links:
            self.loop.start_worker = self._start_worker  # else a copy is done at once

    def _start_worker(self, work, delay_s):
        worker = Worker(self.loop, work)
        worker.start(delay_s)
        return worker.future

    def stream(self, name):
        return random_streams.stream(self.seed, name)

    def note(self, text):
        """Append an event to the trace."""
        self.trace.append((round(self.loop.now_s, 6), text))

    def digest(self):
        """Hash the trace: the same seed always gives the same hash."""
        return blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    def next_router_life(self, host):
        """Return an incarnation number that no other router process has."""
        self.router_lives += 1
        return self.router_lives

    def fail(self, text):
        """Record a violation; the first one ends the run."""
        if self.violation is None and not self.loop.is_over:  # then only cleaned up
            self.violation = text
            self.note(f"VIOLATION {text}")
            self.loop.end()

    @contextlib.contextmanager
    def taps(self):
        """Replace disks, locks and some constants by simulated ones, and record events."""

        def open_disk(folder, *_, **__):
            return self.nodes[folder.name].open_disk(STATES)

        def refuse(_, folder, *__, **___):
            message = f"a simulated node opens the real disk at {folder}"
            self.fail(message)
            raise AssertionError(message)

        with (
            simulated_locks(),
            self.watch.taps(),
            self.owner_wait_judge.taps(),
            self.edits.taps(),
            self.lineage.taps(),
            self.directing.privacy.taps(),
            self.directing.judge.taps(),
            self.term_judge.taps() if self.has_standby else contextlib.nullcontext(),
            mock.patch.object(granted_terms, "PosixDisk", open_disk),
            mock.patch.object(drain_flag, "PosixDisk", open_disk),
            mock.patch.object(PosixDisk, "__init__", refuse),
            # A simulated token is one byte: only then are the router's estimates of seconds right.
            mock.patch.object(
                prompt, "BYTES_PER_TOKEN", 1.0 if self.has_power_cuts or self.lends_heads else 4.0
            ),
            mock.patch.object(
                head_lenders,
                "HEAD_LOAN_TOKENS_MIN",
                1 if self.lends_heads else head_lenders.HEAD_LOAN_TOKENS_MIN,
            ),
        ):
            yield

    async def live(self):
        """Start the fabric, inject faults, heal it, wait until it settles, and check its state."""
        for host in (*self.nodes.values(), self.router):
            host.boot()
        talking = asyncio.create_task(self.clients.run())
        await self.chaos.run()
        await talking
        self.note("quiet")
        await asyncio.sleep(QUIET_S)
        while any(host.node.resources.workers.fetching_count for host in self.nodes.values()):  # noqa: ASYNC110
            await asyncio.sleep(1.0)  # a fetch waits half a minute for a dead peer
        self.invariants.check_quiet()
        await self.clients.take_last_turns()
        await asyncio.sleep(3.0)
        await self._await_moves()
        if any(pinned_blocks(host.node) for host in self.nodes.values()):
            self.note("a move is undecided, and hours pass")
            self.term_judge.is_over = True  # real clocks do not jump like this
            for host in self.nodes.values():
                host.clock.offset_s += STALE_S
            await asyncio.sleep(RECLAIM_EVERY_S + 1.0)
            await self._await_moves()
        self.invariants.check_end()

    async def _await_moves(self):
        """Wait for drains and copies that slow links delay, then for saves and self-tests."""
        idle_s = 0
        while idle_s < IDLE_S:
            await asyncio.sleep(1.0)
            idle_s = 0 if self._is_moving() else idle_s + 1
        for _ in range(SAVE_POLLS):  # a save that a full disk refused may be retried now
            if any(_is_writing(host.node) for host in self.nodes.values()):
                await asyncio.sleep(0.1)
        for _ in range(SELF_TEST_POLLS):  # one runs as soon as the disk is well again
            if any(_tests_itself(host.node) for host in self.nodes.values()):
                await asyncio.sleep(0.1)

    def _is_moving(self):
        services = self.router.services
        is_draining = any(drain.ended_s is None for drain in services.drains._drains.values())
        return is_draining or services.replicas._copying or not services.moves.is_idle


def _is_writing(node):
    return bool(+node.tiers.budget.pending or node.resources.store.blocks._index._busy)


def _tests_itself(node):
    return any(turn._request.tenant == SELF_TEST_TENANT for turn in node.live_turns)


class _LogJudge(logging.Handler):
    """A handler that fails the run when the product logs an error or a client's text."""

    def __init__(self, world):
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record):
        process = PROCESS.get()
        if process is not None and process.is_dead:
            return
        if MARKER.search(record.getMessage()):
            self._world.fail(f"{record.name} logs the text of a client: {record.getMessage()}")
        if record.levelno < logging.ERROR:
            return
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if isinstance(error, DeviceError):  # an injected fault
                self._world.note(f"log: {record.getMessage()}")
                return
            self._world.note(f"log: {record.getMessage()}: {error!r}")
            if self._world.is_verbose:
                traceback.print_exception(error)
            self._world.fail(f"{record.getMessage()}: {error!r}")


def run(seed: int, make=None, *, is_verbose: bool = False) -> World:
    """Run one seed's life; return its world, with the violation and the trace.

    `make(seed, loop)` makes another world than the random one.
    """
    gc.disable()  # it would cost a tenth of the time
    loop = SimLoop(seed)
    asyncio.set_event_loop(loop)
    world = (make or World)(seed, loop)
    world.is_verbose = is_verbose
    log_judge = _LogJudge(world)
    loggers = [logging.getLogger(name) for name in ("node", "macfabric")]
    before = [(each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.addHandler(log_judge)
        each.propagate = False
        each.setLevel(logging.INFO)
    loop.set_exception_handler(lambda _, context: _unhandled(world, context))
    loop.on_step = world.invariants.check_step
    try:
        with random_streams.seeded_secrets(), world.taps():
            try:
                _drive(world, loop)
            finally:
                for each in loggers:
                    each.removeHandler(log_judge)
                    each.setLevel(logging.CRITICAL)  # mutes processes being cleaned up
                _clean_up(world, loop)
    finally:
        for each, (level, propagate) in zip(loggers, before, strict=True):
            each.setLevel(level)
            each.propagate = propagate
        gc.enable()
    return world


def two_routers(seed, loop):
    """Make a world with a standby router, for `run`."""
    return World(seed, loop, has_standby=True)


def _drive(world, loop):
    living = loop.create_task(world.live())
    living.add_done_callback(lambda _: loop.end())
    loop.call_later(LIMIT_S, _check_progress, world, loop)
    try:
        loop.run_forever()
    except StuckError as stuck:
        world.fail(str(stuck))
    if world.violation is None:
        living.result()


def _check_progress(world, loop):
    """Fail a run without any answer for so long; a run of many slow answers may go on."""
    left_s = world.clients.answered_s + LIMIT_S - loop.now_s
    if left_s > 0:
        loop.call_later(left_s, _check_progress, world, loop)
    else:
        world.fail("the run makes no progress")


def _unhandled(world, context):
    error = context.get("exception")
    process = PROCESS.get()
    if process is not None and process.is_dead:
        return
    world.fail(f"unhandled {error!r}: {context.get('message')}")


def _clean_up(world, loop):
    """End every task, also those of dead processes, so that no destructor has to.

    Called within the taps, so that what the tasks still do stays simulated.
    """
    loop.on_step = None
    loop.is_over = True
    loop.set_exception_handler(lambda *_: None)
    living = [host.process for host in (*world.nodes.values(), *world.router.hosts)]
    unwind(loop)
    loop.start_worker = None
    for process in [*living, *(process for process, _ in world.dead_processes)]:
        loop.thaw(process)
    loop.run_until_complete(_end_all())
    loop.run_until_complete(loop.shutdown_asyncgens())
    asyncio.set_event_loop(None)
    loop.close()


async def _end_all():
    for _ in range(5):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=100)
    assert len(asyncio.all_tasks()) == 1, "a task left over would end in a later run"
