"""One Mac: a disk that persists, and node processes that start and end on it."""

import asyncio
import weakref
from functools import partial
from pathlib import Path

from fabric.control.calls import CallRoute, decode_call, encode_call, encode_reply
from fabric.control.node_calls import Stop
from fabric.errors import FabricError, RetryLaterError
from fabric.settings import NodeSettings
from node import drain_flag
from node.agents.agent_table import recovered_table
from node.assembly import assemble
from node.control_calls import ControlCalls
from node.engine.memory_budget import MemoryBudget
from node.http.hibernation import HibernationHttp
from node.http.routes import ControlHttp, build_app, error_reply
from node.machine import Pressure
from node.node import HttpEndpoint, Node, NodeResources
from node.runtime.identity import NodeConfig, NodeIdentity, ServedModel
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.tiers.memory_pressure import MemoryGauge
from tests.sim.clock import SimClock
from tests.sim.connection import converse
from tests.sim.disk import SimDisk, SimDrive
from tests.sim.engine import SimDevice, SimEngine
from tests.sim.engine_loop import EngineClock, EngineLoop
from tests.sim.loop import Process
from tests.sim.model import CONTEXT_TOKENS_MAX, MODEL
from tests.sim.tokenizer import SimTokenizer
from tests.sim.transfers import SimTransfers, ask_from, fetch_from

CLUSTER_KEY = bytes(range(32))
TOMBSTONES = "erased/"  # their folder on a drive, beside the model's own files
STATES = "state/"  # and a node's own state
PRESSURE_WEIGHTS = (0.97, 0.02, 0.01)  # of each reading, on a machine short of memory
EXIT_S = 0.001  # from the decision to end a process to its end
_NOT_READY = encode_reply(
    error_reply(RetryLaterError("the node is starting or stopping", code="loading"))
)


class NodeHost:
    """A Mac called `name`."""

    def __init__(self, world, name, settings: NodeSettings, tokens_per_s):
        self.name = name
        self.drive = SimDrive(world.stream(f"{name}/disk"))
        self.incarnation = 0
        self.process: Process | None = None
        self.node: Node | None = None  # of the live process
        self._calls: ControlCalls | None = None
        self._app = None
        self.is_listed = True  # by Ray
        self._world = world
        self._settings = settings
        self._tokens_per_s = tokens_per_s
        self.clock: SimClock | None = None
        self._connections = []
        self._unanswered = {}

    @property
    def is_serving(self):
        return self._calls is not None

    # --- the process -------------------------------------------------------------------------

    def boot(self):
        """Start a process of a new incarnation."""
        assert self.process is None or self.process.is_dead, "one process at a time"
        self.incarnation += 1
        self.is_listed = True
        name = f"{self.name}#{self.incarnation}"
        self.process = Process(name, self._world.stream(name))
        self._world.loop.spawn(self.process, self._start())

    def kill(self):
        """Kill the process as SIGKILL and power loss do: none of its code runs any more."""
        process = self.process
        if process.is_dead:
            return
        process.is_dead = True
        self.drive.crash_in = None
        self._world.dead_processes.append((process, self.node))
        self.node = self._calls = self._app = None
        self._world.note(f"{self.name} dies")
        self._world.watch.on_trouble(self.name)
        for response in self._connections:
            response.content.pipe.break_off()
        for fail in self._unanswered.values():
            fail()
        self._connections.clear()
        self._unanswered.clear()
        self._world.chaos.boot_later(self)

    def _exit_callback(self, process):
        """Return a function that kills this process, and no later one, after a moment."""
        return lambda: self._world.loop.call_later(
            EXIT_S, lambda: None if process is not self.process else self.kill()
        )

    def freeze(self):
        self._world.watch.on_trouble(self.name)
        self.process.is_frozen = True

    def thaw(self):
        self._world.loop.thaw(self.process)

    async def _start(self):
        """Start the node; a process that fails to start exits and is started again."""
        process = self.process
        try:
            await self._begin()
        except FabricError as error:
            self._world.note(f"{self.name} does not start: {error.code}: {error.message}")
            assert self.process is process, "only a living process fails"
            self.kill()
        except Exception as error:  # noqa: BLE001 - it would be lost otherwise
            self._world.fail(f"{self.name} cannot start: {error!r}")

    async def _begin(self):
        await asyncio.sleep(0.2 + self.process.random.random())
        self.node = self._build()
        if self._world.has_standby:
            self.node.terms.recall()
        self._app = self._build_app()
        await self.node.background.upkeep.round()
        await self.node.background.self_tests.run()
        if not self.node.background.self_tests.found.passed:
            self._world.note(
                f"{self.name}: self-test: {self.node.background.self_tests.found.detail}"
            )
        self.node.health.is_draining = drain_flag.is_noted(
            self.node.resources.identity.config.data_dir
        )
        self.node.background.retries.loop.start()
        self.node.background.upkeep.loop.start()
        self.node.background.scrubber.start()
        if self._world.is_low_on_memory:
            self.node.background.pressure.loop.start()
        self._calls = ControlCalls(self.node)
        self._world.watch.on_trouble(self.name)  # until now it had no lease
        self._world.note(f"{self.name} serves as incarnation {self.incarnation}")

    def _build(self):
        world = self._world
        self.clock = clock = SimClock(world.loop, 1_000.0 * self.incarnation)
        config = NodeConfig(
            name=self.name,
            data_dir=Path("simulated") / self.name,
            model=MODEL,
            cluster_key=CLUSTER_KEY,
            settings=self._settings,
            host=self.name,
            incarnation=self.incarnation,
        )
        kind = world.kind
        spec, fingerprint = kind.spec, kind.fingerprint
        self.caches = weakref.WeakSet()
        engine = SimEngine(
            self._tokens_per_s,
            0.3 if world.is_slow else 0.02,
            kind,
            self.caches.add,
            SimDevice(world.stream(f"device of {self.process.name}"), world.device_failure_chance),
        )
        engine.note_start = partial(world.edits.note_start, node=self.name)
        disk = self.open_disk()
        disk.recover()
        blocks = BlockStore(disk, spec, fingerprint, readers_count=1)
        erased = TombstoneStore(self.open_disk(TOMBSTONES), CLUSTER_KEY)
        records = ManifestStore(disk, CLUSTER_KEY, erased.epoch_of, erased.is_derived)
        store = AgentStore(blocks, records, CLUSTER_KEY, fingerprint, spec)
        model = ServedModel(MODEL, spec, fingerprint, CONTEXT_TOKENS_MAX, vocabulary_size=128)
        node = assemble(
            NodeResources(
                identity=NodeIdentity(config, model),
                clock=clock,
                engine=EngineLoop(
                    EngineClock(clock, engine),
                    engine,
                    active_max=self._settings.active_max,
                    waiting_max=self._settings.waiting_max,
                    exact_chunks=self._settings.exact_chunks,
                    budget=MemoryBudget(
                        self._settings.hot_bytes,
                        lambda size: world.loop.call_soon(lambda: node.tiers.hot.make_room(size)),
                    ),
                    end_process=self._exit_callback(self.process),
                ),
                tokenizer=SimTokenizer(),
                store=store,
                table=recovered_table(
                    config.name, fingerprint, clock, store, config.settings.rules
                ),
                erased=erased,
                transfers=SimTransfers(self.name, CLUSTER_KEY, clock),
                service_time=ServiceTime(config.name, clock),
                workers=Workers(1),
                gauge=self._gauge(),
                endpoint=HttpEndpoint(f"http://{self.name}"),
                fetch=fetch_from(world),
                ask=ask_from(world, self.name),
            )
        )
        if records.erased_count:
            blocks.empty_quarantine()
        return node

    def _gauge(self):
        """Return a memory gauge, which in some lives reports shortages now and then."""
        if not self._world.is_low_on_memory:
            return MemoryGauge()
        random = self._world.stream(f"memory of {self.process.name}")
        return MemoryGauge(lambda: random.choices([*Pressure], PRESSURE_WEIGHTS)[0])

    def open_disk(self, root=""):
        """Return the living process's view of the drive."""
        return SimDisk(self.drive, self.process, self.kill, root)

    def _build_app(self):
        files = HibernationHttp(
            CLUSTER_KEY, self.node.moves.exports, self.node.moves.imports, self.node.terms
        )
        control = ControlHttp(self.name, CLUSTER_KEY, self._answer_http)
        more = [*files.routes(), *control.routes()]
        return build_app(CLUSTER_KEY, self.node.turns.serve, more)

    async def _answer_http(self, raw):
        calls = self._calls
        return _NOT_READY if calls is None else await calls.answer(raw, CallRoute.HTTP)

    # --- incoming calls ----------------------------------------------------------------------

    def receive(self, raw, reply, fail, peer=None):
        """Accept a control call; its caller gets `reply`, or `fail` if the process dies.

        `peer` is the calling node; None: the router.
        """
        if self.process.is_dead:
            fail()
            return
        self._unanswered[reply] = fail
        self._world.loop.spawn(self.process, self._answer(raw, reply, peer))

    async def _answer(self, raw, reply, peer):
        calls = self._calls
        if calls is None:
            answer = _NOT_READY
        else:
            self._world.watch.on_call(self, decode_call(raw)[0])
            route = CallRoute.ACTOR if peer is None else CallRoute.PEER
            answer = await calls.answer(raw, route, peer)
        del self._unanswered[reply]
        reply(answer)

    def accept(self, response):
        """Take a new connection; none is accepted while the node starts."""
        if self.process.is_dead or self.node is None:
            response.content.pipe.break_off()
            return
        self._connections.append(response)
        self._world.loop.spawn(self.process, self._converse(response))

    async def _converse(self, response):
        try:
            await converse(self._app, response)
        except Exception as error:  # noqa: BLE001 - the server would log it
            self._world.fail(f"{self.name}: a request failed: {error!r}")

    async def stop_cleanly(self):
        """Stop as an operator does: everything is saved first."""
        calls = self._calls
        if calls is not None:
            answer = await calls.answer(encode_call(Stop()))
            self._world.watch.on_stopped(self, answer)
