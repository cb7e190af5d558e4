"""`macfabric up` and `down`: run a whole fabric on this machine in the foreground, and stop it."""

import argparse
import contextlib
import errno
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from fabric.ids import NodeName, parse_node_name
from fabric.limits import STOP_WAIT_S_MAX
from fabric.settings import FabricSettings, RouterSettings, check_hosts_and_origins, is_loopback
from router.cli.client_key import add_key_options, with_client_keys
from router.cli.cluster_down import PROGRESS_S, DownProgress, stop_cluster
from router.cli.config_file import read_settings
from router.cli.config_show import plain_rows
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.errors import MISUSED, CommandError
from router.cli.model_choice import chosen_model
from router.cli.output import Steps
from router.cli.supervisor import Plan, Supervisor
from router.cli.terminal import print_json, print_line
from router.limits import LOCAL_NODES_MAX
from router.listener import bind_listeners
from router.supervise.keeper import Keeper
from router.supervise.processes import (
    ProcessId,
    end,
    is_alive,
    send,
    session_members,
    wait_for_exit,
)
from router.supervise.ray_processes import LocalRay
from router.tls.authority import Subject
from router.tls.machine_hosts import machine_hosts

DOWN_TIMEOUT_S = 60.0  # in addition to the wait for running turns
LEFTOVER_GRACE_S = 5.0


def add_up(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "up",
        description="Start Ray, the nodes and the router on this machine. Ctrl-C, SIGTERM or "
        "`macfabric down` save everything and stop all of it. Nothing is written outside DIR.",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes (default: 1)")
    parser.add_argument("--model", metavar="PATH|NAME", help="a bundled model's name, or a folder")
    parser.add_argument("--host", help="address of the HTTP API (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port of the HTTP API; 0 chooses a free one (default: 8000)"
    )
    add_key_options(parser)
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name by which programs on this machine, such as containers, reach it "
        "without a key; may be repeated",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="cluster.yaml to read")
    parser.add_argument("--json", action="store_true", help="print the `ready` line as JSON")
    parser.set_defaults(run=run_up)


def add_down(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "down",
        description="Stop the fabric that runs in DIR after it has saved everything, and end "
        "what a crashed one left behind. With --config, stop the one that `ray up FILE` "
        "started: log in to each of its Macs, save everything, and stop router, nodes and Ray.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    where.add_argument("--config", type=Path, metavar="FILE", help="the Macs of a cluster.yaml")
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="how many seconds to wait for running turns before they are broken off with an "
        "error; new ones are refused meanwhile (default: router.stop_wait_s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_down)


def run_up(arguments: argparse.Namespace) -> int:
    """Run a local fabric until a signal or `macfabric down`."""
    steps = Steps()
    settings, names = _settings(arguments, steps)
    folder = DataFolder((arguments.data or default_data_dir(settings)).expanduser().resolve())
    os.umask(0o077)
    folder.create()
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.claimed())
        _end_leftovers(folder, steps)
        folder.stop_progress.unlink(missing_ok=True)  # left by an `up` killed in its stop
        for change in folder.keys.create(own_subject(settings.router), datetime.now(UTC)):
            steps.say(change)
        _require_port(settings.router)
        folder.write_settings(settings)
        folder.write_setting_rows(plain_rows(settings, "up", arguments))
        ends = catch_signals()
        keeper = Keeper(folder.log("keeper"))
        stack.callback(folder.forget_run)
        stack.callback(folder.remove_temporaries)
        stack.callback(keeper.close)
        ray = LocalRay(folder.path, names, keeper)
        stack.callback(ray.remove_files)
        if ray.short_dir:
            steps.say(f"Ray's sockets are in {ray.short_dir}: {folder.path} is too long for them")
        ray.environment.update(folder.environment())
        plan = Plan(
            folder,
            folder.config,
            ray.address,
            ray.environment,
            settings.router.host,
            settings.router.port,
            nodes_expected=len(names),
            machine_nodes=len(names),
            at_exit="stop",
            operator_key=folder.renew_operator_key(),
            trusted=folder.keys.authority,
            certificate=own_certificate(settings.router),
            bind=_bind(),
            stop_wait_s=settings.router.stop_wait_s,
            nodes_to_come=len(names),
            node_names=tuple(names),
        )
        supervisor = Supervisor(plan, keeper, ray, steps.say, lambda: bool(ends))
        stack.callback(supervisor.stop, hurry=lambda: len(ends) > 1)
        if supervisor.start():
            print_ready(supervisor, settings.model, as_json=arguments.json)
            supervisor.run()
    steps.say("stopped")
    return 0


def run_down(arguments: argparse.Namespace) -> int:
    """Stop the fabric of a data folder, or of a cluster file."""
    if arguments.wait is not None and not 0 <= arguments.wait <= STOP_WAIT_S_MAX:
        message = f"--wait must be 0 to {STOP_WAIT_S_MAX:g}"
        raise CommandError(message, MISUSED)
    if arguments.config is not None:
        return stop_cluster(arguments.config, arguments.wait, as_json=arguments.json)
    folder = DataFolder((arguments.data or default_data_dir()).expanduser().resolve())
    steps = Steps(quiet=arguments.json)
    up, _ = folder.read_run()
    running = up is not None and is_alive(up)
    if running:
        assert up is not None
        _stop_running(folder, up, arguments.wait, DownProgress(steps, as_json=arguments.json))
    killed = _end_leftovers(folder, steps)
    was = "running" if running else "crashed" if killed else "not running"
    if arguments.json:
        print_json({"was": was, "ended": killed, "data": str(folder.path)})
    else:
        steps.say("nothing was running" if was == "not running" else "stopped")
    return 0


def _stop_running(
    folder: DataFolder, up: ProcessId, wait_s: float | None, progress: DownProgress
) -> None:
    """Tell `up` to stop, and wait for its end; raise CommandError if it does not end.

    A stop in progress is only waited for: a second signal would end its turns at once, which is
    for `--wait 0`.
    """
    longest_s = folder.read_run_wait() if wait_s is None else wait_s
    is_stopping = bool(folder.read_stop_progress())
    if is_stopping:
        progress.note({"event": "already_stopping"})
        longest_s = longest_s if wait_s == 0 else STOP_WAIT_S_MAX
    else:
        if wait_s is not None:
            folder.write_stop_wait(wait_s)
        progress.note({"event": "asked", "pid": up.pid, "wait_s": longest_s})
    if wait_s == 0 or not is_stopping:
        send([up], signal.SIGTERM)
    deadline_s = time.monotonic() + longest_s + DOWN_TIMEOUT_S
    while wait_for_exit([up], PROGRESS_S):
        progress.note(folder.read_stop_progress())
        if time.monotonic() > deadline_s:
            message = f"Process {up.pid} did not stop within {longest_s + DOWN_TIMEOUT_S:g} s."
            raise CommandError(message)


def catch_signals() -> list[int]:
    """Collect SIGINT and SIGTERM in a list instead of dying."""
    got: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _frame: got.append(which))
    return got


def own_certificate(settings: RouterSettings) -> Path | None:
    """Return the operator's own certificate for the router, if TLS is on and one is set."""
    chosen = settings.tls.certificate if settings.uses_tls else ""
    return Path(chosen).expanduser() if chosen else None


def own_subject(router: RouterSettings | None = None) -> Subject:
    """Return the hosts that the certificate of a fabric on this machine is for."""
    more = (*router.tls.names, *router.allowed_hosts) if router else ()
    return Subject.of([*machine_hosts(), *more])


def print_ready(supervisor: Supervisor, model: str, *, as_json: bool) -> None:
    """Print the line with the fabric's URL and nodes."""
    plan, seconds = supervisor.plan, supervisor.phases["ready"]
    nodes = sorted(supervisor.nodes)
    if as_json:
        ready = {
            "event": "ready",
            "url": supervisor.url,
            "nodes": nodes,
            "model": model,
            "data": str(plan.folder.path),
            "pid": os.getpid(),
            "seconds": seconds,
            "phases": supervisor.phases,
        }
        print_json(ready, indent=None, flush=True)
    else:
        listed = ", ".join(nodes) or "no nodes yet"
        ready_line = f"macfabric is ready at {supervisor.url} ({listed}; {model}; {seconds} s)"
        print_line(ready_line, flush=True)


def _settings(arguments: argparse.Namespace, steps: Steps) -> tuple[FabricSettings, list[NodeName]]:
    try:
        settings = read_settings(arguments.config)
        router = replace(
            settings.router,
            host=settings.router.host if arguments.host is None else arguments.host,
            port=settings.router.port if arguments.port is None else arguments.port,
            allowed_hosts=(*settings.router.allowed_hosts, *map(str.lower, arguments.allow_host)),
        )
        check_hosts_and_origins(router)
        router = with_client_keys(router, arguments, steps.say)
        names = [parse_node_name(name) for name in settings.local_nodes]
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    count = arguments.nodes if arguments.nodes is not None else max(1, len(names))
    if not 1 <= count <= LOCAL_NODES_MAX:
        message = f"--nodes must be 1 to {LOCAL_NODES_MAX}"
        raise CommandError(message, MISUSED)
    if not 0 <= router.port <= 65535:
        message = "--port must be 0 to 65535"
        raise CommandError(message, MISUSED)
    if not (router.api_keys or router.operator_keys or is_loopback(router.host)):
        steps.say("no API key is set, so other machines are refused: see --api-key-file")
    names += [NodeName(f"node-{chr(ord('a') + i)}") for i in range(len(names), count)]
    if len(set(names[:count])) < count:
        message = "two local nodes have the same name"
        raise CommandError(message, MISUSED)
    model = chosen_model(arguments.model or settings.model)
    local = tuple(names[:count])
    chosen = replace(settings, router=router, model=model, local_nodes=local, keys_dir="")
    return chosen, names[:count]


def _require_port(router: RouterSettings) -> None:
    """Raise CommandError now if the router could not listen after everything else has started."""
    try:
        for listener in bind_listeners(router.host, router.port):
            listener.close()
    except OSError as error:
        why = error.strerror or error
        is_ports = error.errno in {errno.EADDRINUSE, errno.EACCES}
        remedy = (
            "--port 0 chooses a free one"
            if is_ports
            else "--host takes an address of this machine, or 0.0.0.0 for all of them"
        )
        message = f"cannot listen on {error.filename} port {router.port} ({why}); {remedy}"
        raise CommandError(message) from None


def _bind() -> str | None:
    # Ray replaces 127.0.0.1 by the machine's own address, where the nodes of one Mac need not
    # listen. On Linux every local node has a loopback address of its own.
    return None if sys.platform.startswith("linux") else "127.0.0.1"


def _end_leftovers(folder: DataFolder, steps: Steps) -> int:
    """End the processes that a crashed fabric left behind; return their number."""
    _, processes = folder.read_run()
    noted = list(processes.values())
    leftovers: list[ProcessId] = session_members(noted)
    if leftovers:
        steps.say(f"ending {len(leftovers)} processes of a fabric that crashed")
        survivors = end(noted, LEFTOVER_GRACE_S)
        if survivors:
            message = f"cannot end processes {[p.pid for p in survivors]}"
            raise CommandError(message)
    folder.remove_temporaries()
    folder.forget_run()
    return len(leftovers)
