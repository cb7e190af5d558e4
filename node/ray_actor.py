"""A node as a Ray actor: takes control calls at once, loads the model behind them.

Light to import, because every driver that creates or finds the actor imports it: the service,
and with it MLX, is loaded in the actor's own process only.
"""

import asyncio
import contextlib
import hashlib
import importlib
import logging
import secrets
import threading
from pathlib import Path
from typing import Any

import ray

from fabric.codec import unpack
from fabric.control import ErrorReply, Stop, encode_reply, is_call
from fabric.errors import FabricError
from fabric.ids import parse_node_name
from fabric.settings import NodeSettings
from fabric.short_pauses import keep_pauses_short

NAMESPACE = "macfabric"
CONTROL_CALLS_MAX = 64  # long copies among them; beats must not wait for those
LOADING = "loading"
START_FAILED = "start_failed"
STOPPING = "stopping"
SERVICE_MODULE = "node.service"
_RETRY_AFTER_S = 0.5
_INCARNATION = "incarnation"
_INCARNATION_BYTES_MAX = 32
# The first of a data folder is random, so that a wiped folder does not repeat old numbers;
# JSON keeps integers exact up to 2**53.
_FIRST_INCARNATION_BITS = 48

_log = logging.getLogger("macfabric.node.ray_actor")


def actor_name(node: str) -> str:
    """Name the actor of a node; routers find it by this."""
    return f"macfabric-node-{node}"


def origin_of(*arguments: str | bytes) -> bytes:
    """Return a digest of what an actor is started with; it says nothing about the key in it."""
    digest = hashlib.blake2b(digest_size=32)
    for argument in arguments:
        raw = argument.encode() if isinstance(argument, str) else argument
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.digest()


class NodeActor:
    """One node's process as Ray runs it; takes plain arguments, so a restart needs nothing else."""

    def __init__(
        self,
        name: str,
        data_dir: str,
        model: str,
        host: str,
        cluster_key: bytes,
        settings: bytes,
        service_module: str = SERVICE_MODULE,
    ) -> None:
        self._service: Any = None
        self._refusal: ErrorReply | None = _refusal(LOADING, "the model is loading")
        arguments = (name, data_dir, model, host, cluster_key, settings, service_module)
        self._origin = origin_of(*arguments)
        threading.Thread(target=self._start, args=arguments, name="start", daemon=True).start()

    @ray.method(concurrency_group="control")
    async def control(self, raw: bytes) -> bytes:
        """Answer one control call; blocks nobody else for as long as it takes."""
        refusal = self._refusal
        if refusal is not None:
            return encode_reply(refusal)
        reply = bytes(await asyncio.wrap_future(self._service.control(raw)))
        if is_call(raw, Stop):
            self._refusal = _refusal(STOPPING, "the node has stopped")
            await asyncio.to_thread(self._service.stop)
        return reply

    @ray.method(concurrency_group="control")
    async def origin(self) -> bytes:
        """Tell what it was started with; Ray restarts it with the same for ever."""
        return self._origin

    def _start(
        self,
        name: str,
        data_dir: str,
        model: str,
        host: str,
        cluster_key: bytes,
        settings: bytes,
        service_module: str,
    ) -> None:
        try:
            service = importlib.import_module(service_module)
            folder = Path(data_dir).expanduser()
            config = service.NodeConfig(
                name=parse_node_name(name),
                data_dir=folder,
                model=model,
                cluster_key=cluster_key,
                settings=unpack(NodeSettings, settings),
                host=host,
                incarnation=next_incarnation(folder),
            )
            self._service = service.NodeService(config)
            self._service.start()
            keep_pauses_short()
        except Exception as error:  # noqa: BLE001 - whatever it is, callers are told
            _log.exception("node %s did not start", name)
            why = error.message if isinstance(error, FabricError) else str(error)
            self._refusal = _refusal(START_FAILED, f"{type(error).__name__}: {why}")
        else:
            self._refusal = None


def next_incarnation(folder: Path) -> int:
    """Count this start of the node whose data folder this is, durably."""
    from node.posix_disk import PosixDisk

    disk = PosixDisk(folder)
    try:
        last = 0
        with contextlib.suppress(FileNotFoundError, ValueError, FabricError):
            last = int(disk.read(_INCARNATION, _INCARNATION_BYTES_MAX))
        count = last + 1 if last > 0 else 1 + secrets.randbits(_FIRST_INCARNATION_BITS)
        disk.publish(_INCARNATION, [str(count).encode()])
    finally:
        disk.close()
    return count


def _refusal(code: str, message: str) -> ErrorReply:
    # A start that failed is final until somebody changes something; the rest passes.
    retry_after_s = None if code == START_FAILED else _RETRY_AFTER_S
    return ErrorReply(
        status=500 if code == START_FAILED else 503,
        code=code,
        message=message,
        retry_after_s=retry_after_s,
    )
