"""All commands of `macfabric`."""

import argparse

import fabric
from router.cli.agent_verbs import add_agent_verbs
from router.cli.bench import add_bench
from router.cli.certs import add_certs
from router.cli.demo.demo import add_demo
from router.cli.directives import add_direct
from router.cli.doctor.config_check import add_config
from router.cli.doctor.doctor import add_doctor
from router.cli.drain import add_drain
from router.cli.events import add_events
from router.cli.fsck import add_fsck
from router.cli.hibernate import add_hibernation
from router.cli.launch.launch import add_launch
from router.cli.parser import CommandParser
from router.cli.queries import add_queries
from router.cli.ray_start import add_ray_start
from router.cli.scenario.scenario import add_scenario
from router.cli.serve import add_serve
from router.cli.up import add_down, add_up


def build_parser() -> argparse.ArgumentParser:
    """Declare every command."""
    parser = CommandParser(
        prog="macfabric",
        description="A fabric of Macs that gives LLM agents a persistent, movable KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"macfabric {fabric.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for declare in (
        *(add_up, add_down, add_serve, add_ray_start, add_launch, add_queries, add_events),
        *(add_agent_verbs, add_direct, add_drain, add_hibernation, add_scenario),
        *(add_doctor, add_fsck, add_config, add_certs, add_demo, add_bench),
    ):
        declare(commands)
    return parser
