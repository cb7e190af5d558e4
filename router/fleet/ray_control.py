"""Control calls as calls of Ray actors: the only module of the router that calls Ray.

Messages are small. A call that fails may or may not have been executed, and is not repeated here:
the callers know which calls are safe to repeat.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.util

from fabric.errors import FabricError, FatalError, RejectedError, RetryLaterError
from fabric.hosting.ray_names import (
    NAMESPACE,
    actor_name,
    is_node_actor,
    machine_of,
    node_of_actor,
)
from fabric.ids import NodeName
from router.fleet.node_client import ControlTransport, NodeLostError

LEAVE_TIMEOUT_S = 10.0
JOIN_S = 600.0  # for a new router to join Ray on a busy machine
JOIN_POLL_S = 1.0

_LOG = logging.getLogger("macfabric.router.ray")
_joining = threading.Lock()  # only one thread joins or leaves Ray at a time


def connect(address: str, namespace: str = NAMESPACE, wait_s: float = 0.0) -> None:
    """Join a running Ray cluster as a driver; raise FatalError if that fails for `wait_s`.

    The cluster of a busy machine answers before it can be joined, so a failed join is retried.
    """
    deadline_s = time.monotonic() + wait_s
    while (reason := _failure_to_join(address, namespace)) is not None:
        if time.monotonic() >= deadline_s:
            message = f"no Ray cluster answers at {address}: {reason}"
            raise FatalError(message)
        _LOG.warning("cannot join Ray at %s yet: %s", address, reason)
        time.sleep(JOIN_POLL_S)


def _failure_to_join(address: str, namespace: str) -> str | None:
    """Try to join once; return the reason of a failure, or None."""
    with _joining:
        try:
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,  # output of nodes may contain prompts
                configure_logging=False,
            )
        except Exception as error:  # noqa: BLE001 - Ray raises plain Exception when it is slow
            ray.shutdown()  # a partial connection would make the next try fail
            return str(error) or type(error).__name__
    return None


def disconnect() -> None:
    """Leave the cluster; its actors keep running.

    Waits for a join in progress; if that takes too long, the end of the process leaves the cluster.
    """
    if not _joining.acquire(timeout=LEAVE_TIMEOUT_S):
        _LOG.warning("still joining Ray: the process ends without leaving it")
        return
    try:
        ray.shutdown()
    finally:
        _joining.release()


class Driver:
    """Client of Ray in this process, which can leave the cluster and rejoin it.

    While it is outside, calls wait, as Ray would end the process; calls in progress are lost.
    Dropping a reference to a pending result while the driver leaves would end the process too, so
    all references are kept until it has left, including those of cancelled calls.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[Any]] = set()
        self._pending: dict[int, Any] = {}  # references to pending results, by identity
        self._has_joined = asyncio.Event()
        self._has_joined.set()

    async def wait_until_joined(self) -> None:
        """Wait until calls may be made."""
        await self._has_joined.wait()

    async def result(self, reference: Any) -> Any:
        """Return the result of a call; raise ConnectionError if the driver leaves meanwhile."""
        call = self._follow(reference)
        del reference
        self._calls.add(call)
        try:
            await asyncio.wait({call})
            if call.cancelled():
                message = "the router rejoined the cluster during the call"
                raise ConnectionError(message)
            return call.result()
        finally:
            self._calls.discard(call)
            call.cancel()

    def _follow(self, reference: Any) -> asyncio.Future[Any]:
        """Return a future of a reference's result; the reference is kept until Ray has it."""
        loop, key = asyncio.get_running_loop(), id(reference)
        call: asyncio.Future[Any] = loop.create_future()

        def settle(result: concurrent.futures.Future[Any]) -> None:
            if self._has_joined.is_set():
                self._pending.pop(key, None)
            if call.done():
                return
            error = result.exception()
            if error is not None:
                call.set_exception(error)
            else:
                call.set_result(result.result())

        self._pending[key] = reference
        reference.future().add_done_callback(partial(_settle_soon, loop, settle))
        return call

    @contextlib.asynccontextmanager
    async def detached(self) -> AsyncIterator[None]:
        """Cancel calls in progress, and have further calls wait until a cluster is joined."""
        self._has_joined.clear()
        for call in tuple(self._calls):
            call.cancel()
        while self._calls:  # noqa: ASYNC110 - until only `_pending` has references
            await asyncio.sleep(0)
        try:
            yield
        finally:
            if ray.is_initialized():
                self._has_joined.set()

    def forget_pending(self) -> None:
        """Forget pending results, once the driver has left."""
        self._pending.clear()


def _settle_soon(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[concurrent.futures.Future[Any]], None],
    result: "concurrent.futures.Future[Any]",
) -> None:
    """Settle a call in its event loop, from one of Ray's threads."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the router has stopped
        loop.call_soon_threadsafe(settle, result)


class ActorTransport:
    """Transport of control calls to a node's actor, in whichever process it runs."""

    def __init__(self, name: NodeName, driver: Driver) -> None:
        self._name = name
        self._driver = driver
        self.handle: Any = None  # None until the roster finds a living actor

    async def __call__(self, raw: bytes) -> bytes:
        await self._driver.wait_until_joined()
        handle = self.handle
        if handle is None:
            message = f"{self._name} has no actor at the moment"
            raise NodeLostError(message, self._name)
        try:
            reply = await self._driver.result(handle.control.remote(raw))
        except ray.exceptions.ActorDiedError:
            if self.handle is handle:
                self.handle = None
            message = f"the actor of {self._name} is dead"
            raise NodeLostError(message, self._name) from None
        except ray.exceptions.RayTaskError as error:
            _LOG.warning("%s: control call raised %s", self._name, type(error.cause).__name__)
            message = f"{self._name} failed on a control call"
            raise FabricError(message, code="control_failed") from None
        except Exception as error:  # noqa: BLE001 - Ray raises plain ones, too
            message = f"the actor of {self._name} cannot be reached ({type(error).__name__})"
            raise NodeLostError(message, self._name) from None
        return bytes(reply)


class ActorRoster:
    """Nodes that have an actor in the cluster, by the actors' names."""

    def __init__(
        self,
        namespace: str = NAMESPACE,
        address: str | None = None,
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        """Look in `namespace`; with an `address`, rejoin the cluster when needed.

        Ray installs signal handlers when it joins; `on_joined` may restore the process's own.
        """
        self._namespace = namespace
        self._address = address
        self._on_joined = on_joined
        self._driver = Driver()
        self._transports: dict[NodeName, ActorTransport] = {}

    async def __call__(self) -> Mapping[NodeName, ControlTransport]:
        """Return the transports of all nodes, after looking for new and restarted actors."""
        try:
            if self._address is not None and await asyncio.to_thread(_is_orphaned):
                async with self._driver.detached():
                    await self._rejoin(self._address)
                    await self._find_actors()
            else:
                await self._find_actors()
        except Exception as error:  # noqa: BLE001 - Ray raises plain ones, too
            message = f"Ray does not list its actors ({type(error).__name__})"
            raise RetryLaterError(message) from None
        return self._transports

    async def _find_actors(self) -> None:
        for name in await asyncio.to_thread(_node_names, self._namespace):
            transport = self._transports.setdefault(name, ActorTransport(name, self._driver))
            if transport.handle is None:
                transport.handle = await asyncio.to_thread(
                    _actor, actor_name(name), self._namespace
                )

    async def _rejoin(self, address: str) -> None:
        _LOG.warning("the Ray node of this router is gone: rejoining the cluster")
        for transport in self._transports.values():
            transport.handle = None
        try:
            await asyncio.to_thread(disconnect)
            self._driver.forget_pending()
            await asyncio.to_thread(connect, address, self._namespace)
        finally:
            self._on_joined()  # also after a failed attempt


def _is_orphaned() -> bool:
    """Return whether this driver's own Ray node is gone and has a successor.

    Such a driver still reaches the actors that it knew, but does not learn the addresses of
    restarted actors, which come from its Ray node. Without a successor, there is no node to join.
    """
    if not ray.is_initialized():  # an earlier attempt failed
        return True
    own_id = ray.get_runtime_context().get_node_id()
    rows = ray.nodes()
    alive = [row for row in rows if row["Alive"] and row["NodeID"] != own_id]
    for row in rows:
        if row["NodeID"] == own_id:  # including one whose end Ray has not noticed yet
            return any(machine_of(other) == machine_of(row) for other in alive)
    return bool(alive)


def _actor(name: str, namespace: str) -> Any:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None  # ended since it was listed


def _node_names(namespace: str) -> list[NodeName]:
    names = []
    for row in ray.util.list_named_actors(all_namespaces=True):
        actor = row["name"]
        if row["namespace"] == namespace and is_node_actor(actor):
            try:
                names.append(node_of_actor(actor))
            except RejectedError:
                _LOG.warning("an actor has the prefix of nodes, but no valid node name")
    return names
