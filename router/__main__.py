"""`python -m router`: serve the clients of a fabric whose nodes Ray knows."""

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

from fabric.errors import FabricError, FatalError
from fabric.settings import FabricSettings, RouterSettings
from router.cli.config_file import read_settings
from router.cli.errors import CommandError
from router.cli.folder import KEY_BYTES, DataFolder, default_data_dir
from router.listener import listen
from router.placement import Policy


def main() -> int:
    """Run the router; return the exit status."""
    if not __debug__:
        print("do not run under python -O: assertions guard the fabric", file=sys.stderr)  # noqa: T201
        return 2
    arguments = _arguments()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = read_settings(arguments.config)
        key = _read_key(arguments.data_dir or default_data_dir(settings))
        chosen = _overridden(settings, arguments)
        with listen(chosen.host, chosen.port) as listener:
            # Most of a restart is spent here. Clients already wait in line: none is refused.
            from router.serve import serve

            policy = Policy(arguments.policy)
            asyncio.run(serve(chosen, key, arguments.ray_address, listener, policy=policy))
    except (FabricError, CommandError) as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - why it did not start
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, help="a cluster file with our section")
    parser.add_argument("--data-dir", type=Path, help="the folder that holds cluster.key")
    parser.add_argument("--ray-address", default="auto", help="host:port of Ray's head")
    parser.add_argument("--host", help="listen here instead of where the settings say")
    parser.add_argument("--port", type=int, help="likewise; 0 takes any free port")
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in Policy],
        default=Policy.SECONDS.value,
        help="how new agents are placed; the others are baselines to compare with",
    )
    return parser.parse_args()


def _overridden(settings: FabricSettings, arguments: argparse.Namespace) -> RouterSettings:
    chosen = settings.router
    if arguments.host is not None:
        chosen = replace(chosen, host=arguments.host)
    if arguments.port is not None:
        chosen = replace(chosen, port=arguments.port)
    return chosen


def _read_key(data_dir: Path) -> bytes:
    path = DataFolder(data_dir.expanduser()).cluster_key
    try:
        key = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        message = f"{path}: no cluster key there ({type(error).__name__})"
        raise FatalError(message) from None
    if len(key) != KEY_BYTES:
        message = f"{path}: a cluster key has {KEY_BYTES} bytes"
        raise FatalError(message)
    return key


if __name__ == "__main__":
    sys.exit(main())
