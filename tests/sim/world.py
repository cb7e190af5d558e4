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
LIMIT_S = 600.0  # of simulated time without any answer: then something hangs
QUIET_S = FLUSH_IDLE_S + 5.0
IDLE_S = 3  # without a move or copy: no other one is due
SAVE_POLLS = 20  # of a tenth of a second: no save takes that long
SELF_TEST_POLLS = 100
KIB, MIB = 1 << 10, 1 << 20
CROWD_ODDS, CROWD = 0.1, 14  # all at once, where the memory holds two or three of them
FRAIL_ODDS = 0.1  # disks fail while agents move
FAR_ODDS = 0.15  # copies take seconds, and much happens meanwhile
SHORT_ODDS = 0.1  # machines are short of memory now and then
FAULTY_ODDS = 0.15  # the device that computes fails now and then
DEVICE_FAILURE_CHANCE = 0.01  # of a chunk or step there
DARK_ODDS = 0.15  # all processes lose power at once, and prompts take seconds to compute


@dataclass(eq=False)
class World:
    """Everything there is in one run."""

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
    graveyard: list = field(default_factory=list)  # kept, so that no destructor runs by chance

    lends_heads = False  # however short, in some kinds of lives; prompts are short here

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
        """Let some lives be crowded, and in some others the links be slow."""
        self.is_crowded = random.random() < CROWD_ODDS
        self.is_far = random.random() < FAR_ODDS
        self.is_frail = random.random() < FRAIL_ODDS
        if self.is_crowded:
            self.settings = replace(self.settings, hot_bytes=12 * KIB, active_max=8)
            self.talks_count, self.is_rhythmic, self.speeds = CROWD, True, [500]
            self.is_slow = False  # no turn would end
        is_faulty = self.stream("device").random() < FAULTY_ODDS
        self.device_failure_chance = DEVICE_FAILURE_CHANCE if is_faulty else 0.0
        self.is_short = self.stream("memory").random() < SHORT_ODDS
        self.is_dark = self.stream("power cut").random() < DARK_ODDS
        if self.is_dark:
            self.speeds, self.is_slow, self.talks_count = [100], False, 8
        if self.is_far:
            self.loop.start_worker = self._start_worker  # else a copy is done at once

    def _start_worker(self, work, delay_s):
        worker = Worker(self.loop, work)
        worker.start(delay_s)
        return worker.future

    def stream(self, name):
        return random_streams.stream(self.seed, name)

    def note(self, text):
        """Write an event down."""
        self.trace.append((round(self.loop.now_s, 6), text))

    def digest(self):
        """Hash all that happened: the same seed always gives the same."""
        return blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    def next_router_life(self, host):
        """Count the lives of all routers, so that no two have one number."""
        self.router_lives += 1
        return self.router_lives

    def fail(self, text):
        """Say what must not happen; the run ends with the first one."""
        if self.violation is None and not self.loop.is_over:  # then only the dead are buried
            self.violation = text
            self.note(f"VIOLATION {text}")
            self.loop.end()

    @contextlib.contextmanager
    def taps(self):
        """Put this world in place of the real one."""

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
            # A token is a character here: only then are the router's estimates of seconds right.
            mock.patch.object(
                prompt, "BYTES_PER_TOKEN", 1.0 if self.is_dark or self.lends_heads else 4.0
            ),
            mock.patch.object(
                head_lenders,
                "HEAD_LOAN_TOKENS_MIN",
                1 if self.lends_heads else head_lenders.HEAD_LOAN_TOKENS_MIN,
            ),
        ):
            yield

    async def live(self):
        """Start, disturb, heal, let it settle, and look at what is left."""
        for host in (*self.nodes.values(), self.router):
            host.boot()
        talking = asyncio.create_task(self.clients.run())
        await self.chaos.run()
        await talking
        self.note("quiet")
        await asyncio.sleep(QUIET_S)
        while any(host.node.resources.workers.fetching_count for host in self.nodes.values()):  # noqa: ASYNC110
            await asyncio.sleep(1.0)  # a fetch gives a dead peer half a minute
        self.invariants.check_quiet()
        await self.clients.last_words()
        await asyncio.sleep(3.0)
        await self._moves_end()
        if any(pinned_blocks(host.node) for host in self.nodes.values()):
            self.note("a move is undecided, and hours pass")
            self.term_judge.is_over = True  # no clock of a Mac jumps beside those of all others
            for host in self.nodes.values():
                host.clock.offset_s += STALE_S
            await asyncio.sleep(RECLAIM_EVERY_S + 1.0)
            await self._moves_end()
        self.invariants.check_end()

    async def _moves_end(self):
        """Let drains and replicas come to their end whose agents go over slow links still."""
        idle_s = 0
        while idle_s < IDLE_S:
            await asyncio.sleep(1.0)
            idle_s = 0 if self._is_moving() else idle_s + 1
        for _ in range(SAVE_POLLS):  # what a full disk refused is being tried again at times
            if any(_is_writing(host.node) for host in self.nodes.values()):
                await asyncio.sleep(0.1)
        for _ in range(SELF_TEST_POLLS):  # as soon as the disk is well again, for one
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
    """Fails the run where the product logs an error or a client's text."""

    def __init__(self, world):
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record):
        process = PROCESS.get()
        if process is not None and process.is_dead:
            return
        if MARKER.search(record.getMessage()):
            self._world.fail(f"{record.name} logs what a client said: {record.getMessage()}")
        if record.levelno < logging.ERROR:
            return
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if isinstance(error, DeviceError):  # which is the device's fault
                self._world.note(f"log: {record.getMessage()}")
                return
            self._world.note(f"log: {record.getMessage()}: {error!r}")
            if self._world.is_verbose:
                traceback.print_exception(error)
            self._world.fail(f"{record.getMessage()}: {error!r}")


def run(seed: int, make=None, *, is_verbose: bool = False) -> World:
    """Live one seed's life; the world tells what was violated and what happened.

    `make(seed, loop)` makes another world than the one of chance.
    """
    gc.disable()  # in the middle of a run it would cost a tenth of the time
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
                    each.setLevel(logging.CRITICAL)  # what the dead say
                _bury(world, loop)
    finally:
        for each, (level, propagate) in zip(loggers, before, strict=True):
            each.setLevel(level)
            each.propagate = propagate
        gc.enable()
    return world


def two_routers(seed, loop):
    """Make a world with a standby, to give to `run`."""
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
    """Fail where nothing goes on; many slow answers, one after another, take longer."""
    left_s = world.clients.answered_s + LIMIT_S - loop.now_s
    if left_s > 0:
        loop.call_later(left_s, _check_progress, world, loop)
    else:
        world.fail("the run does not come to an end")


def _unhandled(world, context):
    error = context.get("exception")
    process = PROCESS.get()
    if process is not None and process.is_dead:
        return
    world.fail(f"unhandled {error!r}: {context.get('message')}")


def _bury(world, loop):
    """End every task, also those of the dead, so that no destructor has to.

    Within the taps: what they were about to do is done in the simulation, too.
    """
    loop.on_step = None
    loop.is_over = True
    loop.set_exception_handler(lambda *_: None)
    living = [host.process for host in (*world.nodes.values(), *world.router.hosts)]
    unwind(loop)
    loop.start_worker = None
    for process in [*living, *(dead for dead, _ in world.graveyard)]:
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
    assert len(asyncio.all_tasks()) == 1, "a task that nothing ends would end in a later run"
