"""Launch of one node on every Mac of a Ray cluster, and supervision of their actors.

A Mac is a Ray node with the resource `mlx` and a label `mac`, its name. Restarts are made by:

    a process that ended      Ray, at once, with the same actor
    a start that failed       the actor itself, in the same process, after growing waits
    an actor that is dead     this launch, with a new one, after growing waits: the name is free
                              when the old one is gone, and the folder when its process is
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fabric.codec import pack
from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import Describe, Flush, NodeView, Stop
from fabric.errors import FatalError, RejectedError, StartFailedError
from fabric.hosting.ray_names import LABEL, NAMESPACE, RESOURCE, actor_name, machine_of
from fabric.ids import NodeName, parse_node_name
from fabric.settings import FabricSettings
from node.limits import CONTROL_CALLS_MAX, START_REASON_CHARS_MAX

SCAN_S = 1.0
LOADING_POLL_S = 0.1
READY_POLL_S = 2.0
# Until a dead actor is replaced, by the number of dead ones in a row; the first two are replaced at
# once, as after a change of settings. The count restarts after LASTING_S of service.
DEAD_PAUSES_S = (0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
LASTING_S = 60.0
RETRY_SLACK_S = 2.5  # a retry that is later by more belongs to another failure
TICK_S = 0.1
EXIT_TIMEOUT_S = 20.0
_DESCRIBE = encode_call(Describe())

_log = logging.getLogger("macfabric.node.launch")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options with which every node of the cluster is started."""

    settings: FabricSettings
    data_dir: str
    keys_digest: str  # digest of the local keys, which every Mac must have
    bind: str | None = None  # None: the address by which Ray knows the Mac
    service_module: str | None = None
    machine_nodes: int = 1  # nodes of this fabric that share a machine's memory


@dataclass(slots=True)
class LaunchedNode:
    """One actor, with its state as last reported."""

    name: NodeName
    host: str
    actor: Any
    since_s: float
    origin: bytes  # digest of the start that it must have had
    is_ours: bool = False  # confirmed: an actor of that name may have older settings
    call: Any = None  # the reference of a call under way
    ask_at_s: float = 0.0
    view: NodeView | None = None
    ready_at_s: float = 0.0
    failure: str | None = None
    phase: str | None = None  # phase of a running start
    again_at_s: float = 0.0  # when a failed start is retried


@dataclass(slots=True)
class Deaths:
    """Consecutive deaths of one node's actor, and when to restart it."""

    count: int = 0
    again_at_s: float = 0.0


@dataclass(slots=True)
class Launch:
    """Creator and supervisor of a Ray cluster's actors."""

    options: LaunchOptions
    nodes: dict[NodeName, LaunchedNode] = field(default_factory=dict)
    _deaths: dict[NodeName, Deaths] = field(default_factory=dict)
    _scan_at_s: float = 0.0
    _warned_messages: set[str] = field(default_factory=set)

    @property
    def ready(self) -> list[LaunchedNode]:
        return [node for node in self.nodes.values() if node.view is not None]

    def step(self, *, scan: bool) -> Iterator[dict[str, Any]]:
        """Run due work, wait at most a tick, and yield events."""
        now_s = time.monotonic()
        if scan and now_s >= self._scan_at_s:
            self._scan_at_s = now_s + SCAN_S
            self._create_missing()
        for node in self.nodes.values():
            if node.call is None and now_s >= node.ask_at_s:
                node.call = _request_state(node)
        yield from self._collect()

    def _create_missing(self) -> None:
        import ray

        rows = ray.nodes()
        own_id = ray.get_runtime_context().get_node_id()
        if _is_gone(own_id, rows):
            # The supervisor restarts this process; the actors are not affected.
            message = "this machine's Ray node is gone: nothing is known about the other nodes"
            raise FatalError(message)
        for row in rows:
            labels = row.get("Labels", {})
            if not row["Alive"] or LABEL not in labels or RESOURCE not in row["Resources"]:
                continue
            try:
                name = parse_node_name(labels[LABEL])
            except RejectedError as error:
                self._warn_once(f"Ray node {row['NodeManagerAddress']}: {error.message}")
                continue
            deaths = self._deaths.get(name, Deaths())
            if name not in self.nodes and time.monotonic() >= deaths.again_at_s:
                self.nodes[name] = self._create(name, row["NodeManagerAddress"])

    def _create(self, name: NodeName, host: str) -> LaunchedNode:
        import ray

        from node.ray_actor import SERVICE_MODULE, NodeActor, NodeStart, origin_of

        actor_class = ray.remote(concurrency_groups={"control": CONTROL_CALLS_MAX})(NodeActor)
        placed = actor_class.options(
            name=actor_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={RESOURCE: 1},
            label_selector={LABEL: name},  # a restarted Mac has a new Ray id, but its old label
            max_restarts=-1,
            max_task_retries=0,  # a failed call may still have been executed
        )
        options = self.options
        start = NodeStart(
            name=str(name),
            data_dir=f"{options.data_dir}/nodes/{name}",
            model=options.settings.model,
            host=options.bind or host,
            keys_dir=options.settings.keys_dir or options.data_dir,
            keys_digest=options.keys_digest,
            settings=options.settings.node,
            machine_nodes=options.machine_nodes,
            service_module=options.service_module or SERVICE_MODULE,
            log_format=options.settings.log_format,
            tracing=options.settings.tracing,
        )
        packed = pack(start)
        actor = placed.remote(packed)
        return LaunchedNode(name, host, actor, time.monotonic(), origin_of(packed))

    def _collect(self) -> Iterator[dict[str, Any]]:
        import ray

        calls = {node.call: node for node in self.nodes.values() if node.call is not None}
        if not calls:
            time.sleep(TICK_S)
            return
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=TICK_S)
        for reference in done:
            node = calls[reference]
            node.call = None
            node.ask_at_s = time.monotonic() + (READY_POLL_S if node.view else LOADING_POLL_S)
            try:
                answer = ray.get(reference)
                if not node.is_ours:
                    self._keep_or_replace(node, answer)
                    continue
                reply = decode_reply(NodeView, answer)
            except ray.exceptions.RayActorError as error:
                yield from self._on_lost(node, error)
            except RejectedError as error:
                self._warn_once(f"{node.name} sent an invalid answer: {error.message}")
            else:
                yield from self._on_reply(node, reply)

    def _keep_or_replace(self, node: LaunchedNode, origin: bytes) -> None:
        """Keep an actor with the same start options; replace any other."""
        import ray

        if origin == node.origin:
            node.is_ours, node.ask_at_s = True, 0.0
            return
        _log.info("%s runs with other settings; replacing it", node.name)
        stopped = node.actor.control.remote(encode_call(Stop()))
        if not ray.wait([stopped], timeout=EXIT_TIMEOUT_S)[0]:
            _log.warning("%s did not stop in time", node.name)
        ray.kill(node.actor, no_restart=True)
        del self.nodes[node.name]

    def _on_lost(self, node: LaunchedNode, error: Exception) -> Iterator[dict[str, Any]]:
        import ray

        if node.view is not None:
            yield {"event": "lost", "node": node.name, "message": _last_line(str(error))}
            node.since_s = time.monotonic()
        node.view = None
        node.ask_at_s = time.monotonic() + LOADING_POLL_S
        node.failure = node.phase = None
        if isinstance(error, ray.exceptions.ActorDiedError):  # Ray does not restart it
            del self.nodes[node.name]
            yield from self._on_dead(node, str(error))

    def _on_dead(self, node: LaunchedNode, error: str) -> Iterator[dict[str, Any]]:
        now_s = time.monotonic()
        deaths = self._deaths.setdefault(node.name, Deaths())
        has_lasted = node.ready_at_s and now_s - node.ready_at_s > LASTING_S
        deaths.count = 1 if has_lasted else deaths.count + 1
        pause_s = DEAD_PAUSES_S[min(deaths.count, len(DEAD_PAUSES_S)) - 1]
        deaths.again_at_s = now_s + pause_s
        _log.warning("%s: its actor is gone; starting another in %g s", node.name, pause_s)
        if pause_s:
            yield failed_event(node, f"its actor is dead: {_last_line(error)}", pause_s)

    def _on_reply(
        self, node: LaunchedNode, reply: NodeView | ErrorReply
    ) -> Iterator[dict[str, Any]]:
        if isinstance(reply, NodeView):
            restarted = node.view is None or node.view.incarnation != reply.incarnation
            node.view, node.failure, node.phase = reply, None, None
            if restarted:
                node.ready_at_s = time.monotonic()
                yield ready_event(node, reply)
        elif reply.code == StartFailedError.code:
            now_s, wait_s = time.monotonic(), reply.retry_after_s or 0.0
            again_at_s = now_s + wait_s
            is_news = node.failure != reply.message or again_at_s > node.again_at_s + RETRY_SLACK_S
            node.ask_at_s = min(again_at_s + LOADING_POLL_S, now_s + READY_POLL_S)
            if is_news:
                node.failure, node.again_at_s = reply.message, again_at_s
                yield failed_event(node, reply.message, wait_s)
        elif reply.message != node.phase:
            node.phase = reply.message
            yield {"event": "phase", "node": node.name, "message": reply.message}

    def finish(self, how: str, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """Leave the nodes running, flush them, or stop and remove them."""
        import ray

        if how == "leave" or not self.nodes:
            return
        call = encode_call(Stop() if how == "stop" else Flush())
        calls = [node.actor.control.remote(call) for node in self.nodes.values()]
        done, late = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        if late:
            _log.warning("%d of %d nodes did not answer in time", len(late), len(calls))
        if how == "stop":
            for node in self.nodes.values():
                ray.kill(node.actor, no_restart=True)
        _log.info("%s: %d nodes", how, len(done))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned_messages:
            self._warned_messages.add(message)
            _log.warning("%s", message)


def _last_line(text: str) -> str:
    """Return the last line of an error text, bounded; Ray puts the cause there."""
    lines = text.strip().splitlines() or ["?"]
    return lines[-1].strip()[:START_REASON_CHARS_MAX]


def _is_gone(node_id: str, rows: list[dict[str, Any]]) -> bool:
    """Return whether a Ray node is dead, or has a successor before Ray has noticed its end."""
    alive = {row["NodeID"]: machine_of(row) for row in rows if row["Alive"]}
    machine = alive.pop(node_id, None)
    return machine is None or machine in alive.values()


def _request_state(node: LaunchedNode) -> Any:
    """Request an actor's state, or at first the digest of its start options."""
    import ray

    if node.is_ours:
        return node.actor.control.remote(_DESCRIBE)
    try:
        return node.actor.origin.remote()
    except AttributeError:  # an actor of an earlier version has no such method
        return ray.put(b"")


def describe_missing(launch: Launch, expected: int, timeout_s: float) -> str:
    """Describe the nodes that are missing after the timeout."""
    import ray

    missing = sorted(node.name for node in launch.nodes.values() if node.view is None)
    if missing:
        nodes = [launch.nodes[name] for name in missing]
        why = [node.failure or node.phase or "not placed by Ray" for node in nodes]
        reasons = "; ".join(f"{n}: {w}" for n, w in zip(missing, why, strict=True))
        return f"not ready after {timeout_s:g} s: {reasons}"
    hosts = ", ".join(sorted(row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]))
    return (
        f"{len(launch.nodes)} of {expected} Macs joined Ray within {timeout_s:g} s (Ray knows: "
        f"{hosts or 'none'}). A Mac joins by `ray start … --resources='{{\"{RESOURCE}\": 1}}' "
        f"--labels={LABEL}=NAME`"
    )


def ready_event(node: LaunchedNode, view: NodeView) -> dict[str, Any]:
    """Return the event of a node that serves, with the result of its self-test."""
    return {
        "event": "ready",
        "node": node.name,
        "host": view.host,
        "pid": view.pid,
        "url": view.http_url,
        "model": view.model,
        "incarnation": view.incarnation,
        "seconds": round(time.monotonic() - node.since_s, 2),
        "self_test": {"passed": view.self_test.passed, "detail": view.self_test.detail},
    }


def failed_event(node: LaunchedNode, why: str, wait_s: float) -> dict[str, Any]:
    """Return the event of a failed start, with the seconds until its retry."""
    return {"event": "failed", "node": node.name, "message": why, "retry_s": round(wait_s, 1)}
