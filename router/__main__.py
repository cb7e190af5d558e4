"""`python -m router`: serve the clients of a fabric whose nodes are Ray actors."""

import argparse
import asyncio
import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fabric.errors import FabricError
from fabric.hosting.log_files import ROUTER_LOG, add_log_file
from fabric.hosting.process import raise_open_files_limit
from fabric.hosting.tracing import begin_tracing, end_tracing
from fabric.ids import parse_node_name
from fabric.limits import TERM_LEASE_S
from fabric.settings import FabricSettings, RouterSettings
from router.cli.config_file import read_settings
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.errors import CommandError
from router.fleet.expected_nodes import ExpectedNodes
from router.fleet.node_roster import RosterFile
from router.listener import inherited, listen
from router.placement.choice import Policy
from router.placement.placement import Placement
from router.policies.registry import configured_policies
from router.restart import LISTENER_OPTION, RestartRequest, become_restarted
from router.tls.contexts import read_router_keys

LOCAL_OPERATOR = "this machine's command line"  # not a valid name in settings


def main() -> int:
    """Run the router; return the exit status."""
    if not __debug__:
        print("do not run under python -O: assertions guard the fabric", file=sys.stderr)  # noqa: T201
        return 2
    # Ray reads it at import: a driver that lost its cluster must not start one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    arguments = _arguments()
    raise_open_files_limit()
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = read_settings(arguments.config)
        list(configured_policies(settings.router.policies))  # fail before waiting for Ray
        data_dir = arguments.data_dir or default_data_dir(settings)
        keys = read_router_keys(Path(settings.keys_dir or data_dir).expanduser())
        folder = DataFolder(data_dir.expanduser())
        add_log_file(folder.logs / ROUTER_LOG, ROUTER_LOG, settings.log_format)
        begin_tracing(settings.tracing, ROUTER_LOG)
        chosen = _with_operator_key(_overridden(settings, arguments), folder)
        with ExitStack() as opened:
            listeners = inherited(arguments.listener) or listen(chosen.host, chosen.port)
            for listener in listeners:
                opened.enter_context(listener)
            # Clients that connect during a restart wait in the queue of these.
            kept = [opened.enter_context(listener.dup()) for listener in listeners]
            restart = RestartRequest()
            # This import takes most of a restart. Clients can connect already and wait.
            from router.serve import serve
            from router.turns.tenant_usage import UsageFile

            placement = Placement(Policy(arguments.policy))
            serving = serve(
                chosen,
                keys,
                arguments.ray_address,
                listeners,
                placement=placement,
                runs_dir=folder.router_runs,
                stop_wait_s=lambda: folder.read_stop_wait(chosen.stop_wait_s),
                expected=_expected_nodes(chosen, arguments),
                roster_store=RosterFile(folder.roster),
                usage=UsageFile(folder.usage),
                patience_s=2 * TERM_LEASE_S if arguments.standby else 0.0,
                watch_key=folder.watch_key(),
                restart=restart,
            )
            asyncio.run(serving)
            if restart.is_requested:
                become_restarted(kept)
    except (FabricError, CommandError) as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - why it did not start
        return 1
    finally:
        end_tracing()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, help="a cluster file with a macfabric section")
    parser.add_argument("--data-dir", type=Path, help="the folder that holds the keys")
    parser.add_argument("--ray-address", default="auto", help="host:port of Ray's head")
    parser.add_argument("--host", help="listen at this address instead of the one in the settings")
    parser.add_argument("--port", type=int, help="listen at this port; 0 chooses a free one")
    parser.add_argument("--expect", type=int, help="number of nodes of the fabric")
    parser.add_argument(
        "--expect-node", action="append", default=[], help="the name of a node; may be repeated"
    )
    parser.add_argument(
        LISTENER_OPTION, type=int, action="append", default=[], help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--standby", action="store_true", help="let another router become the active one first"
    )
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
    if arguments.expect is not None:
        chosen = replace(chosen, nodes_expected=arguments.expect)
    return chosen


def _expected_nodes(chosen: RouterSettings, arguments: argparse.Namespace) -> ExpectedNodes:
    names = tuple(map(parse_node_name, arguments.expect_node))
    return ExpectedNodes(chosen.nodes_expected, names)


def _with_operator_key(settings: RouterSettings, folder: DataFolder) -> RouterSettings:
    """Return settings that also accept the operator key of this machine's command line."""
    key = folder.read_operator_key()
    keys = settings.operator_keys | ({LOCAL_OPERATOR: key} if key else {})
    return replace(settings, operator_keys=keys)


if __name__ == "__main__":
    sys.exit(main())
