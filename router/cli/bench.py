"""`macfabric bench`: measure this machine against stated limits.

The benchmarks run the model, which the router never does: they are a separate program in the
checkout, started as a child process.
"""

import argparse
from pathlib import Path
from typing import Any

from router.cli.child import run_module
from router.cli.errors import CommandError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
_MARK = "DESCRIPTION = "  # of a benchmark, among modules that several share


def add_bench(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s [--list] [--json] [--quick] [--report FOLDER] [BENCHMARK [OPTION ...]]",
        description="Run one benchmark, or list them all. Exit status 1 if a limit is missed.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="BENCHMARK", help="which one (default: list them)"
    )
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="see `macfabric bench BENCHMARK --help`",
    )
    parser.add_argument("--list", action="store_true", help="list names and descriptions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument(
        "--report",
        metavar="FOLDER",
        help="write the result there, as JSON, Markdown and PNG; without BENCHMARK: render all "
        "results of the folder again",
    )
    parser.set_defaults(run=run_bench)


def benchmark_names() -> list[str]:
    """List the benchmarks; none without a checkout."""
    return sorted(
        path.stem.replace("_", "-")
        for path in FOLDER.glob("*.py")
        if f"\n{_MARK}" in path.read_text(encoding="utf-8")
    )


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the benchmark as a child process; return its exit status."""
    if not (FOLDER / "__main__.py").is_file():
        message = (
            f"there are no benchmarks at {FOLDER}: they are part of the source checkout only; "
            "clone it and run `make setup` there"
        )
        raise CommandError(message)
    flags = ["--json"] if arguments.json else []
    flags += ["--report", arguments.report] if arguments.report else []
    if arguments.name is None or arguments.list:
        return run_module(FOLDER.name, flags, FOLDER.parent)
    flags += ["--quick"] if arguments.quick else []
    return run_module(FOLDER.name, [arguments.name, *flags, *arguments.options], FOLDER.parent)
