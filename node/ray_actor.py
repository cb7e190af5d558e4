"""A node as a Ray actor, which answers control calls while it loads the model.

Light to import, because every driver that creates or finds the actor imports it: the service,
and with it MLX, is loaded in the actor's own process only.
"""

import asyncio
import contextlib
import errno
import gc
import hashlib
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from fabric.codec import pack, unpack_newer
from fabric.control.calls import ErrorReply, decode_reply, encode_reply, is_call
from fabric.control.node_calls import Done, Restart, Stop
from fabric.errors import FabricError, FatalError, StartFailedError
from fabric.hosting.log_files import (
    ENDING,
    LOGS_FOLDER,
    add_log_file,
    node_log,
)
from fabric.hosting.process import keep_pauses_short
from fabric.hosting.tracing import begin_tracing, end_tracing
from fabric.ids import parse_node_name
from fabric.settings import LOG_FORMATS, NodeSettings, TracingSettings
from node.background_loop import BackOff
from node.keys import Keys, certificate_ends_s, read_keys
from node.limits import INCARNATION_BYTES_MAX

LOADING = "loading"
STOPPING = "stopping"
SERVICE_MODULE = "node.service"
_RETRY_AFTER_S = 0.5
RESTART_REPLY_S = 0.5  # time for the reply to a restart to be sent
_INCARNATION = "incarnation"
# The first of a data folder is random, so that a wiped folder does not repeat old numbers;
# JSON keeps integers exact up to 2**53.
_FIRST_INCARNATION_BITS = 48
_UNWRITTEN_INCARNATION_BITS = 40
# Of the step between two starts: a folder restored from a copy must not repeat the number of a
# process that the router has seen, or the router would confuse the two processes' answers.
_STEP_BITS = 20
START_RETRY_S = 0.5
START_RETRY_MAX_S = 15.0
LASTING_RETRY_S = 5.0  # after wrong settings or missing files
LASTING_RETRY_MAX_S = 300.0
_PASSING = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.EIO, errno.EADDRNOTAVAIL,
})  # fmt: skip

_log = logging.getLogger("macfabric.node.ray_actor")


@dataclass(frozen=True, slots=True)
class NodeStart:
    """Options of an actor's start and of each restart."""

    name: str
    data_dir: str
    model: str
    host: str
    keys_dir: str
    keys_digest: str
    settings: NodeSettings
    machine_nodes: int = 1  # nodes of this fabric that share the machine's memory
    service_module: str = SERVICE_MODULE
    log_format: str = LOG_FORMATS[0]
    tracing: TracingSettings = field(default_factory=TracingSettings)


def origin_of(start: bytes) -> bytes:
    """Return a digest of packed start options."""
    return hashlib.blake2b(start, digest_size=32).digest()


class NodeActor:
    """Ray actor of one node; takes a packed NodeStart, which Ray repeats at each restart."""

    def __init__(self, packed: bytes) -> None:
        self._service: Any = None
        self._starting: Any = None  # the service whose start is under way
        self._refusal: ErrorReply | None = _loading("the model is loading")
        self._again_at_s = 0.0  # time of the next try after a failed start
        start = unpack_newer(NodeStart, packed)
        # As this version packs them: an older one may have packed the same options otherwise.
        self._origin = origin_of(pack(start))
        self._previous_log = _begin_log(start)
        begin = partial(self._begin, start)
        arguments = (start.name, begin)
        threading.Thread(target=self._start, args=arguments, name="start", daemon=True).start()

    @ray.method(concurrency_group="control")
    async def control(self, raw: bytes) -> bytes:
        """Answer one control call, without blocking others."""
        refusal = self._refusal
        if refusal is not None:
            return encode_reply(self._with_phase(refusal))
        reply = bytes(await asyncio.wrap_future(self._service.control(raw)))
        if is_call(raw, Stop):
            await self._stop("the node has stopped")
        elif is_call(raw, Restart) and isinstance(decode_reply(Done, reply), Done):
            await self._stop("the node is restarting")
            # Ray restarts the actor in a new process, after the reply has left this one.
            asyncio.get_running_loop().call_later(RESTART_REPLY_S, _end_process)
        return reply

    async def _stop(self, why: str) -> None:
        self._refusal = ErrorReply(503, STOPPING, why, _RETRY_AFTER_S)
        await asyncio.to_thread(self._service.stop)
        await asyncio.to_thread(end_tracing)

    @ray.method(concurrency_group="control")
    async def origin(self) -> bytes:
        """Return the digest of the start options, which Ray repeats at each restart."""
        return self._origin

    def _start(self, name: str, begin: Callable[[], None]) -> None:
        """Retry the start until it succeeds, in this process, which owns the data folder."""
        os.umask(0o077)
        passing = BackOff(START_RETRY_S, START_RETRY_MAX_S)
        lasting = BackOff(LASTING_RETRY_S, LASTING_RETRY_MAX_S)
        while True:
            try:
                begin()
            except Exception as error:  # noqa: BLE001 - callers get every error
                why = error.message if isinstance(error, FabricError) else str(error)
                again = _loading(f"it tries to start again: {why}")
                wait_s = (passing if _is_retriable(error) else lasting).next_s()
                if _is_retriable(error):
                    # A predecessor is about to end, or space may be freed.
                    _log.warning("node %s starts again in %g s: %s", name, wait_s, why)
                    self._refusal = again
                else:
                    _log.exception("node %s did not start; retrying in %g s", name, wait_s)
                    self._again_at_s = time.monotonic() + wait_s
                    self._refusal = _failure_reply(f"{type(error).__name__}: {why}")
            else:
                self._refusal = None
                return
            self._starting = None
            gc.collect()  # the error may keep a half-loaded model alive
            time.sleep(wait_s)
            self._refusal = again

    def _with_phase(self, refusal: ErrorReply) -> ErrorReply:
        if refusal.code != StartFailedError.code:
            phase = getattr(self._starting, "phase", "")
            return replace(refusal, message=phase) if phase else refusal
        return replace(refusal, retry_after_s=max(0.0, self._again_at_s - time.monotonic()))

    def _begin(self, start: NodeStart) -> None:
        keys = _matching(read_keys(Path(start.keys_dir).expanduser()), start.keys_digest)
        importlib.invalidate_caches()  # missing packages may have been installed
        begin_tracing(start.tracing, start.name)
        service = importlib.import_module(start.service_module)
        folder = Path(start.data_dir).expanduser()
        config = service.NodeConfig(
            name=parse_node_name(start.name),
            data_dir=folder,
            model=start.model,
            cluster_key=keys.cluster_key,
            tls=keys.server_context(),
            settings=start.settings,
            host=start.host,
            incarnation=next_incarnation(folder),
            machine_nodes=start.machine_nodes,
            certificate_ends_s=certificate_ends_s(keys.folder),
        )
        self._starting = node_service = service.NodeService(
            config, _end_process, self._previous_log
        )
        node_service.start()
        self._service = node_service
        keep_pauses_short()


def _begin_log(start: NodeStart) -> Any:
    """Log to a file; return the end of the previous process's log.

    The folder of a node is `nodes/NAME` of a fabric's data.
    """
    from node.last_exit import take_log

    stem = Path(start.data_dir).expanduser().parent.parent / LOGS_FOLDER / node_log(start.name)
    before = take_log(stem.with_name(f"{stem.name}{ENDING}"))
    add_log_file(stem, start.name, start.log_format)
    return before


def _end_process() -> None:
    """End this process at once; Ray restarts the node from its disk, with the installed code."""
    logging.shutdown()
    os._exit(os.EX_SOFTWARE)


def _is_retriable(error: Exception) -> bool:
    """Return whether a retry of the start may succeed, since a resource is exhausted or in use.

    A retry cannot fix wrong options (model, key, host).
    """
    from node.store.posix_disk import DiskError

    cause = error.cause if isinstance(error, DiskError) else getattr(error, "errno", None)
    return cause in _PASSING


def _matching(keys: Keys, digest: str) -> Keys:
    if keys.digest != digest:
        message = f"the keys in {keys.folder} are not those of Ray's head: run `ray up` again"
        raise FatalError(message)
    return keys


def next_incarnation(folder: Path) -> int:
    """Increase and return the number of this data folder's node; durable if possible."""
    from node.store.posix_disk import DiskError, PosixDisk

    disk = PosixDisk(folder)
    try:
        last = 0
        with contextlib.suppress(FileNotFoundError, ValueError, FabricError):
            last = int(disk.read(_INCARNATION, INCARNATION_BYTES_MAX))
        bits = _STEP_BITS if last > 0 else _FIRST_INCARNATION_BITS
        count = last + 1 + secrets.randbits(bits)
        try:
            disk.publish(_INCARNATION, [str(count).encode()])
        except DiskError as error:
            # A full drive must not prevent a start, which may free space. The next start may
            # read the same last number, so both add a random step.
            _log.warning("the count of starts is in memory only: %s", error.reason)
            count += secrets.randbits(_UNWRITTEN_INCARNATION_BITS)
    finally:
        disk.close()
    return count


def _loading(message: str) -> ErrorReply:
    return ErrorReply(503, LOADING, message, _RETRY_AFTER_S)


def _failure_reply(message: str) -> ErrorReply:
    return ErrorReply(StartFailedError.status, StartFailedError.code, message)
