"""A whole node in one process: engine thread, disk tier, data plane, HTTP, control.

NodeService(config).start() -> control(bytes) from any thread -> stop()
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import uvicorn

from fabric.control.calls import CallRoute, encode_reply
from fabric.control.usage_view import CRASHED
from fabric.errors import FatalError, RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.hosting.process import raise_open_files_limit
from fabric.ids import NodeName
from fabric.limits import CONTROL_TIMEOUT_S
from fabric.memory_plan import MachineMemory, MemoryPlan, plan_memory
from fabric.net.links import AddressScope, scope_of
from fabric.record.spec_file import SpecRecord
from fabric.sampling_defaults import merged_defaults
from fabric.turn.generation import APPEND_PATH, COUNT_PATH
from node.agents.agent_table import recovered_table
from node.assembly import assemble
from node.background_loop import BackgroundLoop
from node.control_calls import ControlCalls
from node.engine.engine_thread import EngineThread
from node.engine.memory_budget import MemoryBudget
from node.engine.prefill_trial import measure_prefill, trial_tokens
from node.http.hibernation import HibernationHttp
from node.http.routes import ControlHttp, build_app, error_reply, http_server, question_route
from node.last_exit import NO_LOG, ExitWatch, PreviousLog
from node.limits import RUN_MARK_INTERVAL_S
from node.mac_services import PowerAssertion, exclude_from_backups
from node.machine import memory_pressure, ram_bytes, thermal_state
from node.mlx import device
from node.mlx.chat_tokenizer import ChatTokenizer, format_settings
from node.mlx.engine import Engine
from node.mlx.loaded_model import LoadedModel, load_model, weights_bytes
from node.net.listeners import EVERYWHERE
from node.net.probe import Caller
from node.net.prober import LinkProber
from node.node import Node, NodeResources
from node.prompt.continued_prompt import AppendedPrompts
from node.runtime.identity import NodeConfig, NodeIdentity, ServedModel
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.data_folders import DataFolders, DriveIdentity
from node.store.encrypted_disk import EncryptedDisk, open_disk
from node.store.folder_encryption import FolderEncryption
from node.store.folder_format import keep_spec
from node.store.manifest_store import ManifestStore
from node.store.model_folders import folder_name
from node.store.posix_disk import PosixDisk
from node.store.service_time import ServiceTime
from node.store.tombstones import DIRECTORY as ERASED
from node.store.tombstones import TombstoneStore
from node.tiers.memory_pressure import MemoryGauge
from node.transfer.server import TransferServer
from node.usage import Usage

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NOT_READY = encode_reply(
    error_reply(RetryLaterError("the node is starting or stopping; retry later", code="loading"))
)

__all__ = ["NodeConfig", "NodeService"]


class NodeService:
    """A node's whole process: starts and stops the node, and passes control calls to it."""

    def __init__(
        self,
        config: NodeConfig,
        end_process: Callable[[], None] = lambda: None,
        previous_log: PreviousLog = NO_LOG,
    ) -> None:
        """Prepare a node; `end_process` is called when the device keeps failing.

        `previous_log` is the end of the previous process's log.
        """
        if not __debug__:
            message = "assertions guard the cache: do not run under python -O"
            raise FatalError(message)
        self._config = config
        self._end_process = end_process
        self._exits = ExitWatch(config.data_dir.expanduser(), SystemClock())
        self._previous_log = previous_log
        self._marking: BackgroundLoop | None = None
        self.phase = "loading the model"  # phase of a start, in words
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="node", daemon=True)
        self._node: Node | None = None
        self._calls: ControlCalls | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._disk: PosixDisk | None = None
        self._encryption: FolderEncryption | None = None
        self._prober: LinkProber | None = None
        self._power: PowerAssertion | None = None
        self._share_bytes = sys.maxsize  # this node's share of the machine's memory
        self._plan: MemoryPlan | None = None
        self._begun: list[Callable[[], object]] = []  # undo steps of a start, in order

    @property
    def node(self) -> Node:
        assert self._node is not None, "start first"
        return self._node

    def start(self) -> None:
        """Load the model, recover the disk tier, test it, and listen.

        A failed start undoes its steps, so that another may follow in this process.
        """
        try:
            self._start()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._node is not None:
            self.stop()
            return
        for end in reversed(self._begun):
            end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONTROL_TIMEOUT_S)
        self._loop.close()

    def _start(self) -> None:
        os.umask(0o077)
        raise_open_files_limit()
        self._thread.start()
        self._node = node = self._build()
        node.terms.recall()
        self._calls = ControlCalls(node)
        node.resources.transfers.answer_call = self._by_peer
        self._on_loop(node.background.upkeep.round()).result()
        self._on_loop(self._listen()).result()
        self.phase = "measuring prefill speed"  # and choosing forms, which the next one proves
        self._on_loop(self._measure_prefill()).result()
        self.phase = "testing save and restore"
        self._on_loop(node.background.self_tests.run()).result()
        self._on_loop(node.background.drain_flag.recall()).result()
        self._encryption = FolderEncryption(
            node.resources.identity, node.resources.workers, node.health
        )
        folder = self._config.data_dir.expanduser()
        self._on_loop(node.resources.workers.run(lambda: exclude_from_backups(folder)))
        self._power = PowerAssertion(
            lambda: node.has_work, node.resources.clock.monotonic_s, node.health.note_failed_round
        )
        beside = (
            node.background.warm_start,
            node.background.scrubber,
            node.background.retries.loop,
            node.background.upkeep.loop,
            node.background.pressure.loop,
            node.background.sleep,
        )
        self._marking = BackgroundLoop("marking the run", self._mark, node.health.note_failed_round)
        for each in (*beside, self._encryption, self._power, self._marking):
            self._loop.call_soon_threadsafe(each.start)
        links = self._config.settings.encrypt_links
        fingerprint = node.resources.identity.fingerprint
        caller = Caller(self._config.name, self._config.cluster_key, fingerprint, links)
        self._prober = LinkProber(
            node.links, caller.measure, node.resources.clock, node.resources.transfers.follow
        )
        self._prober.start()

    def control(self, raw: bytes) -> Future[bytes]:
        """Answer one control call; callable from any thread."""
        calls = self._calls
        if calls is None:  # and the loop may have ended
            refused: Future[bytes] = Future()
            refused.set_result(_NOT_READY)
            return refused
        return self._on_loop(calls.answer(raw))

    async def _by_http(self, raw: bytes) -> bytes:
        calls = self._calls
        return _NOT_READY if calls is None else await calls.answer(raw, CallRoute.HTTP)

    def _by_peer(self, raw: bytes, peer: NodeName) -> bytes:
        """Answer another node's call, on the thread of its connection."""
        calls = self._calls
        if calls is None:
            return _NOT_READY
        return self._on_loop(calls.answer(raw, CallRoute.PEER, peer)).result(CONTROL_TIMEOUT_S)

    def stop(self) -> None:
        """Save everything and end all threads."""
        if self._node is None:
            return
        self._calls = None
        if self._prober is not None:
            self._prober.stop()
        self._on_loop(self._close()).result()
        self._node.resources.engine.stop()
        self._node.resources.transfers.stop()
        self._node.connections.close()
        self._node.turns.prompts.close()
        self._node.resources.workers.close()
        self._node.resources.erased.close()
        if self._disk is not None:
            self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONTROL_TIMEOUT_S)
        self._loop.close()

    async def _mark(self) -> float:
        await self.node.resources.workers.run(self._exits.note_alive)
        return RUN_MARK_INTERVAL_S

    async def _measure_prefill(self) -> None:
        node = self.node
        tokenizer = node.resources.tokenizer
        context_tokens_max = node.resources.identity.model.context_tokens_max
        tokens = await node.resources.workers.run(
            lambda: trial_tokens(lambda text: tokenizer.encode(text).ids, context_tokens_max)
        )
        await measure_prefill(node.resources.engine, node.resources.clock, tokens)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _build(self) -> Node:
        config, clock = self._config, SystemClock()
        engine, loaded = self._load(clock)
        model = ServedModel(
            loaded.name,
            loaded.spec,
            loaded.fingerprint,
            loaded.context_tokens_max,
            loaded.vocabulary_size,
            loaded.problem,
            merged_defaults(asdict(config.settings.sampling), loaded.sampling),
        )
        self.phase = "recovering the disk"
        disk, erased = self._open_disks(loaded)
        last_exit = self._exits.begin(self._previous_log)  # the folder is locked
        blocks = BlockStore(disk, model.spec, model.fingerprint)
        manifests = ManifestStore(disk, config.cluster_key, erased.epoch_of, erased.is_derived)
        store = AgentStore(blocks, manifests, config.cluster_key, model.fingerprint, model.spec)
        service_time = ServiceTime(config.name, clock, config.data_dir.expanduser())
        rules = config.settings.rules
        table = recovered_table(config.name, model.fingerprint, clock, store, rules, service_time)
        if manifests.erased_count:
            blocks.empty_quarantine()
        tokenizer = ChatTokenizer(loaded.tokenizer, format_settings(config.settings))
        if tokenizer.warning is not None:
            _log.warning("%s: %s", model.name, tokenizer.warning)
        spec = SpecRecord(loaded.fingerprint, loaded.name, loaded.spec)
        folders = DataFolders(
            config,
            disk,
            store,
            erased,
            None if loaded.problem else spec,
            DriveIdentity(config.data_dir.expanduser().resolve()),
        )
        workers = Workers()
        limit_bytes = config.settings.disk_bytes
        usage = Usage(self._plan, limit_bytes, blocks, workers, clock) if self._plan else None
        return assemble(
            NodeResources(
                identity=NodeIdentity(config, model),
                clock=clock,
                engine=engine,
                tokenizer=tokenizer,
                store=store,
                table=table,
                erased=erased,
                folders=folders,
                transfers=TransferServer(
                    config.name,
                    config.cluster_key,
                    model.fingerprint,
                    blocks,
                    clock,
                    host=_data_host(config.host),
                    encrypt_links=config.settings.encrypt_links,
                ),
                service_time=service_time,
                workers=workers,
                usage=usage.view if usage is not None else lambda: None,
                last_exit=last_exit,
                certificate_ends_s=config.certificate_ends_s,
                thermal_state=thermal_state,
                gauge=MemoryGauge(memory_pressure, lambda: device.used_bytes() - self._share_bytes),
            )
        )

    def _load(self, clock: SystemClock) -> tuple[EngineThread, LoadedModel]:
        """Start the engine's thread, and load the model on it."""
        config, settings = self._config, self._config.settings
        plan = self._plan_memory()
        engine = EngineThread(
            clock,
            active_max=settings.active_max,
            waiting_max=settings.waiting_max,
            exact_chunks=settings.exact_chunks,
            budget=MemoryBudget(plan.hot_bytes, self._make_room),
            end_process=self._end_failed,
        )

        def build() -> tuple[Engine, LoadedModel]:
            bits, context_tokens_max = settings.kv_bits, settings.context_tokens_max
            loaded = load_model(config.model, context_tokens_max, bits, plan)
            return loaded.engine, loaded

        self._begun.append(engine.stop)
        loaded: LoadedModel = engine.start(build)
        if loaded.memory is not None and loaded.memory != plan:
            self._plan = loaded.memory
            engine.budget.resize(loaded.memory.hot_bytes)
            _log.info("memory, with long prompts: %s", loaded.memory.explanation)
        return engine, loaded

    def _plan_memory(self) -> MemoryPlan:
        """Divide the machine's memory; raise FatalError for a model that does not fit."""
        config, gpu = self._config, device.gpu_memory()
        machine = MachineMemory(
            ram_bytes(),
            None if gpu is None else gpu.working_set_bytes,
            None if gpu is None else gpu.buffers_max,
            config.machine_nodes,
        )
        plan = plan_memory(machine, weights_bytes(config.model), config.settings.hot_bytes)
        _log.info("memory: %s", plan.explanation)
        self._share_bytes, self._plan = plan.share_bytes, plan
        return plan

    def _open_disks(self, loaded: LoadedModel) -> tuple[PosixDisk, TombstoneStore]:
        """Recover the model's folder, and the tombstones of all models' agents."""
        config, settings = self._config, self._config.settings
        # Another model's agents wait in a folder of their own until it is served again.
        folder = config.data_dir / folder_name(loaded.fingerprint)
        self._disk = disk = open_disk(
            folder, settings.durability, config.cluster_key, encrypts=settings.encrypt_at_rest
        )
        self._begun.append(disk.close)
        disk.recover()
        if isinstance(disk, EncryptedDisk):
            disk.encrypt_all()
        if loaded.problem is None:
            keep_spec(disk, SpecRecord(loaded.fingerprint, loaded.name, loaded.spec))
        tombs = PosixDisk(config.data_dir.expanduser() / ERASED, settings.durability)
        self._begun.append(tombs.close)
        return disk, TombstoneStore(tombs, config.cluster_key)

    def _end_failed(self) -> None:
        """End a process whose device keeps failing."""
        self._exits.note_end(CRASHED, "its device kept failing")
        self._end_process()

    def _make_room(self, size_bytes: int) -> None:
        """Pass the engine's request for memory to the event loop, which owns the idle caches."""
        self._loop.call_soon_threadsafe(lambda: self.node.tiers.hot.make_room(size_bytes))

    async def _listen(self) -> None:
        node = self.node
        listener = socket.create_server((self._config.host, 0))
        # Inherited by connections: asyncio does not take them for TCP and leaves Nagle's delay on.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = listener.getsockname()[:2]
        tls = self._config.tls
        node.resources.endpoint.url = f"{'http' if tls is None else 'https'}://{host}:{port}"
        control = ControlHttp(node.name, self._config.cluster_key, self._by_http)
        files = HibernationHttp(
            self._config.cluster_key, node.moves.exports, node.moves.imports, node.terms
        )
        prompts, key = node.turns.prompts, self._config.cluster_key
        owned_record = node.turns.claims.owned_record
        appended = AppendedPrompts(node.resources.tokenizer, prompts.threads, owned_record)
        questions = [
            question_route(COUNT_PATH, key, prompts.count),
            question_route(APPEND_PATH, key, appended.prompt),
        ]
        more = [*files.routes(), *control.routes(), *questions]
        app = build_app(self._config.cluster_key, node.turns.serve, more)
        server = http_server(app, tls)
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def _close(self) -> None:
        node = self.node
        node.health.is_draining = node.health.is_stopping = True
        await node.background.warm_start.stop()
        await node.background.scrubber.stop()
        if self._encryption is not None:
            await self._encryption.stop()
        await node.live_turns.end()
        await node.turns.fetched.close()
        await node.tiers.prefetches.close()
        await node.background.retries.loop.stop()
        await node.background.upkeep.loop.stop()
        await node.background.pressure.loop.stop()
        await node.background.sleep.stop()
        await node.background.folders.ensure_folders()
        unsaved_count = await node.tiers.flusher.flush()
        if self._power is not None:
            await self._power.stop()
        if self._marking is not None:
            await self._marking.stop()
        if not node.background.folders.is_gone:
            await node.resources.workers.run(node.resources.service_time.save)
        await node.resources.workers.run(self._exits.note_end)
        if unsaved_count:
            _log.error(
                "%d agents are lost with this process: %s", unsaved_count, node.health.degraded
            )
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, CONTROL_TIMEOUT_S)


def _data_host(host: str) -> str:
    """Return the data plane's listening address: all interfaces, unless `host` is loopback."""
    try:
        return host if scope_of(host) is AddressScope.MACHINE else EVERYWHERE
    except ValueError:  # a name that an operator bound it to
        return host
