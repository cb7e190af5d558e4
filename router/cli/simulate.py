"""`macfabric simulate`: compare policies of placement on a modelled fleet.

The simulator drives the router's serving parts, which the command line does not import: it is a
separate program, started as a child process.
"""

import argparse
import json
from typing import Any

from router.cli.child import run_module
from router.simulate.request import SimulateRequest

_DEFAULT = SimulateRequest()


def add_simulate(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "simulate",
        description="Drive the shipped placement over seeded workloads or a trace, in simulated "
        "time, and compare it with the rules of other systems. `--list` names what can be chosen.",
    )
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help="W1 to W9 (default: all)")
    add("--trace", metavar="FILE", help="turns from JSON lines in Mooncake's format instead")
    add("--speedup", type=_positive, default=1.0, help="divide the trace's times by this")
    add("--fleet", default=_DEFAULT.fleet, help="a shipped fleet, or a YAML file")
    add("--policy", action="append", default=[], metavar="NAME", help="may be repeated")
    add("--load", action="append", type=_positive, default=[], metavar="SHARE",
        help="of the fleet's capacity; may be repeated (default: 0.75)")  # fmt: skip
    add("--seeds", type=_count, default=_DEFAULT.seeds, help="number of seeds (default: 3)")
    add("--first-seed", type=int, default=_DEFAULT.first_seed, metavar="N",
        help="first seed (default: 1)")  # fmt: skip
    add("--sessions", type=_count, help="per run (default: by workload)")
    add("--size", type=_positive, default=_DEFAULT.size, metavar="SHARE",
        help="of the sessions by workload, if --sessions is not given (default: 1)")  # fmt: skip
    add("--link-mbit", type=_positive, help="of every node, instead of the fleet's own")
    add("--fault", action="append", default=[], metavar="FAULT",
        help="lose:NODE@S+S, drain:NODE@S+S or slow:NODE@S+SxF; may be repeated")  # fmt: skip
    add(
        "--wrong-speeds",
        metavar="LOW-HIGH",
        help="nodes report speeds that are wrong by these factors",
    )
    add("--slow-links", type=_positive, default=1.0, metavar="FACTOR", help="slow all transfers")
    add("--html", metavar="FILE", help="write a self-contained report")
    add("--png", metavar="FILE", help="write the chart")
    add("--json", action="store_true", help="print JSON; equal studies print equal bytes")
    add("--list", action="store_true", dest="listing", help="list workloads, fleets and policies")
    parser.set_defaults(run=run_simulate)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run the simulator as a child process; return its exit status."""
    options = vars(arguments)
    plural = {"policies": "policy", "loads": "load", "faults": "fault"}
    plain = {name: options[plural.get(name, name)] for name in _DEFAULT.as_plain()}
    return run_module("router.simulate", [json.dumps(plain)])


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        message = f"{text} must be above 0 and below 1e9"
        raise argparse.ArgumentTypeError(message)
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10_000_000:
        message = f"{text} must be 1-10000000"
        raise argparse.ArgumentTypeError(message)
    return value
