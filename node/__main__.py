"""Start the nodes of a Ray cluster: `python -m node --help`.

Events go to stdout, one JSON object per line (`waiting` for Ray, `connected`, `phase` of a start,
`ready`, `lost`, `failed`), and in words to stderr. The exit status is 0 once all nodes are ready,
or with --watch once a signal ends it.
"""

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from fabric.errors import FabricError, FatalError
from fabric.hosting.cluster_file import read_settings
from fabric.settings import FabricSettings
from node.keys import read_keys
from node.launch import Launch, LaunchOptions, describe_missing
from node.ray_connection import connect

_log = logging.getLogger("macfabric.node.launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if not __debug__:
        sys.exit("python -m node: assertions guard the cache, do not use python -O")
    # Ray reads it when it is imported: a lost driver must not start a cluster of its own.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    # Ray prints warnings about the cluster to the standard output of every driver.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.umask(0o077)
    try:
        return _run(arguments, output)
    except FabricError as error:
        _log.error("%s", error.message)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m node", description=__doc__)
    parser.add_argument("--config", type=Path, help="cluster.yaml with metadata.macfabric")
    parser.add_argument(
        "--data-dir", required=True, help="holds the keys here and nodes/NAME on each Mac"
    )
    parser.add_argument("--ray-address", default="auto", help="HOST:PORT of Ray's head")
    parser.add_argument("--model", help="a bundled model's name or a folder (over --config)")
    parser.add_argument("--bind", help="address the nodes listen on (default: Ray's)")
    parser.add_argument("--expect", type=int, default=1, help="wait for this many nodes")
    parser.add_argument(
        "--machine-nodes", type=int, default=1, help="nodes that share the memory of one machine"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for them")
    parser.add_argument(
        "--ray-timeout", type=float, default=math.inf, help="seconds to wait for Ray"
    )
    parser.add_argument("--watch", action="store_true", help="stay, and serve Macs that join later")
    parser.add_argument(
        "--at-exit",
        choices=("leave", "flush", "stop"),
        default="leave",
        help="what to do with the nodes at the end of --watch (default: leave)",
    )
    parser.add_argument("--service-module", help=argparse.SUPPRESS)  # tests have stand-ins
    return parser


def _run(arguments: argparse.Namespace, output: IO[str]) -> int:
    settings = _read_settings(arguments.config)
    if arguments.model:
        settings = replace(settings, model=arguments.model)
    options = LaunchOptions(
        settings,
        arguments.data_dir,
        read_keys(Path(settings.keys_dir or arguments.data_dir).expanduser()).digest,
        arguments.bind,
        arguments.service_module,
        max(1, arguments.machine_nodes),
    )
    began_s = time.monotonic()
    deadline_s = began_s + arguments.timeout
    joined_by_s = began_s + min(arguments.timeout, arguments.ray_timeout)
    connect(
        arguments.ray_address,
        joined_by_s,
        lambda reason: _print_event({"event": "waiting", "message": reason}, output),
    )
    _print_event({"event": "connected"}, output)
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # set after Ray, which installs its own handlers
        signal.signal(number, lambda got, _frame: ended.append(got))
    launch = Launch(options)
    complete = False
    while not ended:
        for event in launch.step(scan=arguments.watch or not complete):
            _print_event(event, output)
            if event["event"] == "failed" and not arguments.watch:
                return 1
        complete = complete or len(launch.ready) >= max(arguments.expect, len(launch.nodes))
        if complete and not arguments.watch:
            return 0
        if not complete and time.monotonic() > deadline_s:
            raise FatalError(describe_missing(launch, arguments.expect, arguments.timeout))
    launch.finish(arguments.at_exit)
    return 0


def _read_settings(path: Path | None) -> FabricSettings:
    try:
        return read_settings(path)
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise FatalError(message) from None


def _print_event(event: dict[str, object], output: IO[str]) -> None:
    output.write(json.dumps(event) + "\n")
    output.flush()
    detail = event.get("message") or event.get("url") or ""
    if "retry_s" in event:
        detail = f"{detail} (tries to start again in {event['retry_s']} s)"
    _log.info("%s %s %s", event.get("node", "Ray"), event["event"], detail)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Ray's own teardown takes a second and has nothing left to do
