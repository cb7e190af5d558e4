"""Supervision of a fabric's processes: start in order, restart what dies, stop in order.

    start:  Ray nodes (local only) ─► node launch ─► router ─► every node answers through it
    stop:   router, so that no turn begins ─► nodes save unsaved agents ─► Ray

A start may take as long as it makes progress (`StartWatch`), up to a fixed bound. Progress is an
event of a started process, a growing log, or processor time used: a busy machine shows these
slowly, a hung start not at all.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.cli.data_folder import DataFolder
from router.cli.errors import CommandError
from router.cli.output import failed_again
from router.client.client import Fabric
from router.client.http_api import ClientError
from router.private_files import write_private
from router.supervise.failures import describe_status, last_words, words_of
from router.supervise.keeper import KEEPER, Keeper
from router.supervise.processes import cpu_seconds, identify, send
from router.supervise.ray_processes import LocalRay, read_log

STALL_S = 180.0  # without progress, after which a start has failed
START_LIMIT_S = 1_800.0  # of one start, even while it makes progress
LOOK_S = 2.0
# Idle processes of a fabric use less than a tenth of a core; a start on a busy machine uses more.
CPU_PROGRESS_S = 20.0


@dataclass(slots=True)
class StartWatch:
    """Progress of one start."""

    logs: Path
    root_pid: int
    limit_s: float = START_LIMIT_S
    stall_s: float = STALL_S
    now_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[int], float] = cpu_seconds
    _began_s: float = field(init=False)
    _progress_s: float = field(init=False)
    _looked_s: float = 0.0
    _log_bytes: int = 0
    _cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._began_s = self._progress_s = self.now_s()

    def note(self) -> None:
        """Count an event of a process as progress."""
        self._progress_s = self.now_s()

    def expired(self) -> str | None:
        """Return why the start has failed, or None while it may continue."""
        now_s = self.now_s()
        if now_s - self._began_s > self.limit_s:
            return f"was not ready within {self.limit_s:g} s"
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._check_progress()
        if self.now_s() - self._progress_s > self.stall_s:
            return f"was not ready in time: no progress for {self.stall_s:g} s"
        return None

    def _check_progress(self) -> None:
        log_bytes, cpu_s = _total_bytes(self.logs), self.cpu_s(self.root_pid)
        if log_bytes != self._log_bytes or cpu_s - self._cpu_s > CPU_PROGRESS_S:
            self._log_bytes, self._cpu_s = log_bytes, cpu_s
            self.note()


def _total_bytes(folder: Path) -> int:
    sizes = 0
    for path in folder.glob("*.log"):
        try:
            sizes += path.stat().st_size
        except OSError:  # removed since the listing
            continue
    return sizes


NODES = "nodes"
ROUTER = "router"
ROUTER_GRACE_S = 15.0  # in addition to the wait for running turns
HURRY_GRACE_S = 3.0
NODES_GRACE_S = 25.0
START_TRIES = 5  # of one process, before the fabric has served
RESTART_WINDOW_S = 120.0
# Restarts slow down for a process that ends repeatedly. Nodes keep running: they hold memory.
RESTART_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
TICK_S = 0.1
NODES_TIMEOUT_S = 2.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes of a fabric to supervise, and their settings."""

    folder: DataFolder
    config: Path | None
    ray_address: str
    environment: dict[str, str]
    host: str
    port: int
    nodes_expected: int  # to wait for; 0: any number, now or later
    at_exit: str  # "stop" or "flush" the nodes
    start_timeout_s: float = START_LIMIT_S  # for the start of nodes, even while it makes progress
    ray_timeout_s: float = START_LIMIT_S  # to join a Ray cluster that others start
    operator_key: str | None = None  # for requests to our own router
    trusted: Path | None = None  # authority of the router's certificate, if it has one
    certificate: Path | None = None  # the operator's own certificate, if it is used
    machine_nodes: int = 1  # nodes that share this machine's memory
    bind: str | None = None  # where nodes listen; None: their address in Ray
    waits_indefinitely: bool = False  # for nodes that join later, once Ray is joined
    stop_wait_s: float = 0.0  # for running turns, unless `down --wait` sets another
    nodes_to_come: int = 0  # expected number, for the router; 0: unknown
    node_names: tuple[str, ...] = ()  # names of those, where known


@dataclass(slots=True)
class Supervisor:
    """State of one fabric's processes, and their supervision."""

    plan: Plan
    keeper: Keeper
    ray: LocalRay | None
    say: Callable[[str], None]
    wants_end: Callable[[], bool]
    url: str | None = None
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last `ready` of each
    phases: dict[str, float] = field(default_factory=dict)  # seconds after the start
    _began_s: float = field(default_factory=time.monotonic)
    _ended: dict[str, list[float]] = field(default_factory=dict)
    _router_started: bool = False
    # Ended processes, and when each may start again.
    _held_back: dict[str, float] = field(default_factory=dict)
    _first_failure: str | None = None  # of this start: later failures follow from it
    _start_phases: dict[str, str] = field(default_factory=dict)  # of nodes that are starting
    _watch: StartWatch | None = None

    def start(self) -> bool:
        """Start everything and wait until it serves; return False if stopped meanwhile."""
        logs = self.plan.folder.log(NODES).parent
        self._watch = StartWatch(logs, self.keeper.process.pid, self.plan.start_timeout_s)
        if self.ray is not None:
            self.ray.start()
        self._start_nodes()
        while not self.wants_end():
            self._step()
            self._note_ray()
            ray_phase = "connected" if self.ray is None else "ray_head"
            if not self._router_started and ray_phase in self.phases:
                self._start_router()
            if (
                self.url
                and len(self.nodes) >= self.plan.nodes_expected
                and self._reaches_all_nodes()
            ):
                self._mark("ready")
                return True
            if not self.plan.waits_indefinitely and (reason := self._watch.expired()):
                raise self._start_failure(self._awaited_process(), reason)
        return False

    def run(self) -> None:
        """Keep everything running until a stop is requested."""
        while not self.wants_end():
            self._step()

    def stop(self, *, hurry: Callable[[], bool]) -> None:
        """Stop the router, the nodes and Ray, in this order; `hurry` ends the waits."""
        self._note_stop("stopping")
        if ROUTER in self.keeper.children:
            self._stop_router(hurry)
        if NODES in self.keeper.children:
            self._note_stop("saving")
            self.say("stopping the nodes; agents in memory are saved first")
            self.keeper.end([NODES], 0.0 if hurry() else NODES_GRACE_S)
        if self.ray is not None:
            self._note_stop("stopping_ray")
            self.say("stopping Ray")
            self.ray.stop()

    def _stop_router(self, hurry: Callable[[], bool]) -> None:
        """Stop the router, which waits for running turns as long as configured."""
        router = self.keeper.children[ROUTER]
        self.say("stopping the router")
        send([router], signal.SIGTERM)
        wait_s = self.plan.folder.read_stop_wait(self.plan.stop_wait_s)
        deadline_s, is_hurried = time.monotonic() + wait_s + ROUTER_GRACE_S, False
        while ROUTER in self.keeper.children and time.monotonic() < deadline_s:
            if hurry() and not is_hurried:
                is_hurried = True
                send([router], signal.SIGTERM)  # breaks off the turns
                deadline_s = time.monotonic() + HURRY_GRACE_S
            event = self.keeper.next_event(TICK_S) or {}
            if event.get("name") == KEEPER and event["event"] == "exited":
                return
            if event.get("event") == "line":
                self._report_drain(event["text"])
        if ROUTER in self.keeper.children:
            self.keeper.end([ROUTER], 0.0)

    def _note_stop(self, event: str, **figures: object) -> None:
        self.plan.folder.write_stop_progress({"event": event, **figures})

    def _report_drain(self, line: str) -> None:
        with contextlib.suppress(ValueError):
            drain = json.loads(line)
            if isinstance(drain, dict) and drain.get("event") == "draining":
                turns, left_s = drain.get("turns"), drain.get("left_s")
                self._note_stop("draining", turns=turns, left_s=left_s)
                how_to_hurry = "Ctrl-C again ends them at once"
                self.say(f"waiting for running turns: {turns}, up to {left_s} s; {how_to_hurry}")

    def _step(self) -> None:
        event = self.keeper.next_event(TICK_S)
        if event is not None:
            if self._watch is not None:
                self._watch.note()
            self._on_event(event)
        self._start_held_back()  # includes what this event ended

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self._write_run()
        elif event["event"] == "line":
            self._on_line(event["name"], event["text"])
        elif event["event"] == "exited":
            self._on_exit(event["name"], event["status"], event["why"])

    def _on_line(self, name: str, text: str) -> None:
        try:
            value = json.loads(text)
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        if name == ROUTER and isinstance(value.get("url"), str):
            self.url = value["url"]
            self._mark("router")
            self._write_endpoint()
            self.say(f"router listens at {self.url}")
        elif name == NODES:
            self._on_node(value)

    def _on_node(self, event: dict[str, Any]) -> None:
        node, kind = str(event.get("node")), event.get("event")
        if kind == "ready":
            test = event.get("self_test") or {}
            self.nodes[node] = event
            self._start_phases.pop(node, None)
            self._mark(f"node {node}")
            self.say(f"{node} is ready (pid {event.get('pid')}, {event.get('model')})")
            if not test.get("passed"):
                self.say(f"warning: {node}'s cache self-test failed: {test.get('detail')}")
        elif kind == "lost":
            self.nodes.pop(node, None)
            self.say(f"{node} is lost ({event.get('message')}); Ray restarts it")
        elif kind == "phase":
            self._start_phases[node] = str(event.get("message"))
            self.say(f"{node}: {event.get('message')}")
        elif kind == "waiting":
            self.say(str(event.get("message")))
        elif kind == "connected":
            self._mark("connected")
        elif kind == "failed":
            if "ready" not in self.phases and self.plan.nodes_expected:
                message = f"{node} cannot start: {event.get('message')}"
                raise CommandError(message + self._first_cause())
            self.say(f"{node} {failed_again(event.get('message'), event.get('retry_s'))}")

    def _on_exit(self, name: str, status: int | None, why: str) -> None:
        reason = why or ("ended" if status is None else describe_status(status))
        if name == KEEPER:
            raise self._failure(name, reason)
        if cause := self._end_reason(name, status):
            reason += f" ({cause})"
        now_s = time.monotonic()
        recent = [t for t in self._ended.get(name, []) if t > now_s - RESTART_WINDOW_S] + [now_s]
        self._ended[name] = recent
        if not self._may_try_again(name):
            raise self._start_failure(name, reason)
        if "ready" not in self.phases and self._first_failure is None:
            self._first_failure = str(self._failure(name, reason))
        pause_s = RESTART_PAUSES_S[min(len(recent), len(RESTART_PAUSES_S)) - 1]
        self._held_back[name] = now_s + pause_s
        self.say(f"{name} {reason}; starting it again{f' in {pause_s:g} s' if pause_s else ''}")

    def _end_reason(self, name: str, status: int | None) -> str:
        """Return the reason for a process's end from its logs; killed ones have none."""
        ray_node = self.ray.find(name) if self.ray else None
        if ray_node and self.ray:
            return self.ray.end_reason(ray_node)
        return last_words(read_log(self.plan.folder.log(name))) if (status or 0) > 0 else ""

    def _may_try_again(self, name: str) -> bool:
        """Return whether an ended process may restart; before it served, only if Ray ended."""
        has_joined = "ready" in self.phases or "connected" in self.phases
        if "ready" in self.phases or (self.plan.waits_indefinitely and has_joined):
            return True
        is_rays = self.ray is not None and any(self.ray.find(ended) for ended in self._ended)
        return is_rays and len(self._ended[name]) < START_TRIES

    def _start_held_back(self) -> None:
        """Restart what ended once Ray's head runs: without it, it would end again."""
        now_s = time.monotonic()
        for name in [name for name, at_s in self._held_back.items() if at_s <= now_s]:
            ray_node = self.ray.find(name) if self.ray else None
            if ray_node and self.ray:
                self.ray.start_node(ray_node)
            elif self._has_head():
                self._start_nodes() if name == NODES else self._start_router()
            else:
                continue
            del self._held_back[name]

    def _has_head(self) -> bool:
        if self.ray is None:
            return True
        head = self.ray.nodes[0]
        return head.process not in self._held_back and self.ray.has_started(head)

    def _start_nodes(self) -> None:
        plan = self.plan
        argv = [sys.executable, "-m", "node", "--watch", f"--at-exit={plan.at_exit}"]
        argv += ["--data-dir", str(plan.folder.path), "--ray-address", plan.ray_address]
        argv += ["--expect", str(plan.nodes_expected), "--timeout", str(plan.start_timeout_s)]
        if "connected" not in self.phases:  # later, Ray may take any time to come back
            argv += ["--ray-timeout", str(plan.ray_timeout_s)]
        argv += ["--config", str(plan.config)] if plan.config else []
        argv += ["--bind", plan.bind] if plan.bind else []
        argv += ["--machine-nodes", str(plan.machine_nodes)]
        self.keeper.start(NODES, argv, plan.environment, plan.folder.log(NODES), piped=True)

    def _start_router(self) -> None:
        plan = self.plan
        self._router_started = True
        # After a restart the router keeps the address that clients know.
        port = plan.port if self.url is None else int(self.url.rpartition(":")[2])
        argv = [sys.executable, "-m", "router", "--data-dir", str(plan.folder.path)]
        argv += ["--ray-address", plan.ray_address, "--host", plan.host, "--port", str(port)]
        argv += ["--expect", str(plan.nodes_to_come)]
        argv += [f"--expect-node={name}" for name in plan.node_names]
        argv += ["--config", str(plan.config)] if plan.config else []
        # Return freed memory of long bodies to the system; macOS does that by itself.
        environment = plan.environment | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        self.keeper.start(ROUTER, argv, environment, plan.folder.log(ROUTER), piped=True)

    def _note_ray(self) -> None:
        if self.ray is None or "ray" in self.phases:
            return
        started = [node for node in self.ray.nodes if self.ray.has_started(node)]
        if self.ray.nodes[0] in started and self._mark("ray_head"):
            self.say(f"Ray's head runs at {self.ray.address}")
        if len(started) == len(self.ray.nodes) and self._mark("ray"):
            self.say(f"all {len(started)} Ray nodes run")

    def _mark(self, phase: str) -> bool:
        if phase in self.phases:
            return False
        self.phases[phase] = round(time.monotonic() - self._began_s, 2)
        return True

    def _reaches_all_nodes(self) -> bool:
        """Return whether the router itself reaches every node."""
        assert self.url is not None
        try:
            trusted = tuple(filter(None, [self.plan.certificate or self.plan.trusted]))
            router = Fabric(
                self.url, None, self.plan.operator_key, NODES_TIMEOUT_S, trusted, checks_name=False
            )
            ready = [row for row in router.nodes() if row.get("state") == "ready"]
        except ClientError:
            return False
        return len(ready) >= self.plan.nodes_expected

    def _write_run(self) -> None:
        me = identify(os.getpid())
        assert me is not None
        processes = {KEEPER: self.keeper.process, **self.keeper.children}
        outside = self.ray.short_dir if self.ray else None
        self.plan.folder.write_run(me, processes, outside, self.plan.stop_wait_s)

    def _write_endpoint(self) -> None:
        record = {"url": self.url, "pid": os.getpid(), "ray_address": self.plan.ray_address}
        if self.plan.certificate is not None:
            record["certificate"] = str(self.plan.certificate)
        write_private(self.plan.folder.endpoint, json.dumps(record))

    def _awaited_process(self) -> str:
        """Return the name of the process that the start waits for."""
        if self.ray is not None and "ray" not in self.phases:
            late = [node for node in self.ray.nodes if not self.ray.has_started(node)]
            if late:
                return late[0].process
        return NODES if self.url else ROUTER

    def _start_failure(self, name: str, reason: str) -> CommandError:
        """Return a start's failure, with the first failure if that was another process."""
        phases = "; ".join(f"{node}: {phase}" for node, phase in self._start_phases.items())
        failure = self._failure(name, f"{reason} ({phases})" if phases else reason)
        return CommandError(f"{failure}{self._first_cause()}")

    def _first_cause(self) -> str:
        first = self._first_failure
        return f"\nthe first failure of this start: {first}" if first else ""

    def _failure(self, name: str, reason: str) -> CommandError:
        log = self.plan.folder.log(name)
        words = words_of(read_log(log))[-LOG_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in words)
        return CommandError(f"{name} {reason}; the end of {log}:\n{tail or '  | (empty)'}")
