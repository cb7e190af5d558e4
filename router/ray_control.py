"""Control calls as calls of Ray actors: the one place where the router meets Ray.

Small messages only. A call that fails may or may not have been carried out, and none is
repeated here: the callers know which calls are safe to repeat.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions
import ray.util

from fabric.errors import FabricError, FatalError, RejectedError, RetryLaterError
from fabric.ids import NodeName, parse_node_name
from router.node_link import ControlTransport, NodeLostError

NAMESPACE = "macfabric"
ACTOR_PREFIX = "macfabric-node-"

_LOG = logging.getLogger("macfabric.router.ray")


def connect(address: str, namespace: str = NAMESPACE) -> None:
    """Join a running Ray cluster as a driver; raise FatalError where there is none."""
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,  # what nodes print may quote prompts
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = f"no Ray cluster answers at {address}: {error}"
        raise FatalError(message) from None


def reconnect_if_orphaned(address: str, namespace: str = NAMESPACE) -> bool:
    """Join the cluster anew if this driver's own Ray node died; say whether that was so.

    Such a driver still reaches the actors that it knew, but is never told where a restarted one
    lives: its Ray node would have to say so.
    """
    own = ray.get_runtime_context().get_node_id()
    if any(row["NodeID"] == own and row["Alive"] for row in ray.nodes()):
        return False
    _LOG.warning("our own Ray node is gone: joining the cluster anew")
    ray.shutdown()
    _join(address, namespace)
    return True


def disconnect() -> None:
    """Leave the cluster; what runs there goes on."""
    ray.shutdown()


class ActorTransport:
    """Control calls to one node's actor, whichever process it lives in at the moment."""

    def __init__(self, name: NodeName) -> None:
        self._name = name
        self.handle: Any = None  # None until the roster finds an actor that is not dead

    async def __call__(self, raw: bytes) -> bytes:
        """Call the actor once and return its bytes."""
        handle = self.handle
        if handle is None:
            message = f"{self._name} has no actor at the moment"
            raise NodeLostError(message)
        try:
            reply = await handle.control.remote(raw)
        except ray.exceptions.ActorDiedError:
            if self.handle is handle:
                self.handle = None
            message = f"the actor of {self._name} is dead"
            raise NodeLostError(message) from None
        except ray.exceptions.RayTaskError as error:
            _LOG.warning("%s: control call raised %s", self._name, type(error.cause).__name__)
            message = f"{self._name} failed on a control call"
            raise FabricError(message, code="control_failed") from None
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            message = f"the actor of {self._name} is out of reach ({type(error).__name__})"
            raise NodeLostError(message) from None
        return bytes(reply)


class ActorRoster:
    """The nodes that have an actor in the cluster, by the actors' names."""

    def __init__(self, namespace: str = NAMESPACE, address: str | None = None) -> None:
        """Look in `namespace`; with an `address`, join the cluster anew where that is needed."""
        self._namespace = namespace
        self._address = address
        self._transports: dict[NodeName, ActorTransport] = {}

    async def __call__(self) -> Mapping[NodeName, ControlTransport]:
        """Look for new actors, and for successors of dead ones."""
        try:
            await self._stay_connected()
            names = await asyncio.to_thread(_node_names, self._namespace)
            for name in names:
                transport = self._transports.setdefault(name, ActorTransport(name))
                if transport.handle is None:
                    actor = f"{ACTOR_PREFIX}{name}"
                    transport.handle = await asyncio.to_thread(_actor, actor, self._namespace)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            message = f"Ray does not tell its actors ({type(error).__name__})"
            raise RetryLaterError(message) from None
        return self._transports

    async def _stay_connected(self) -> None:
        if self._address is None:
            return
        if not ray.is_initialized():  # an earlier attempt came too early
            await asyncio.to_thread(_join, self._address, self._namespace)
        elif not await asyncio.to_thread(reconnect_if_orphaned, self._address, self._namespace):
            return
        for transport in self._transports.values():
            transport.handle = None


def _join(address: str, namespace: str) -> None:
    try:
        connect(address, namespace)
    except FatalError as error:
        raise ConnectionError(error.message) from None


def _actor(name: str, namespace: str) -> Any:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None  # gone since it was listed


def _node_names(namespace: str) -> list[NodeName]:
    names = []
    for row in ray.util.list_named_actors(all_namespaces=True):
        actor = row["name"]
        if row["namespace"] == namespace and actor.startswith(ACTOR_PREFIX):
            try:
                names.append(parse_node_name(actor.removeprefix(ACTOR_PREFIX)))
            except RejectedError:
                _LOG.warning("an actor with a node's prefix has no node's name")
    return names
