"""`macfabric bench`: measure this machine, and see whether the stated limits are kept.

The benchmarks run the model, which the router never does: they are a program of their own in
the checkout, started as a child.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from router.cli.errors import FAILED, CommandError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def add_bench(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine against stated limits (of a checkout only)",
        usage="%(prog)s [--list] [--json] [--quick] [NAME [OPTION ...]]",
        description="Run one benchmark, or list them all. Exit status 1 if a limit is missed.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one; none: list them")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="see `macfabric bench NAME --help`",
    )
    parser.add_argument("--list", action="store_true", help="list names and descriptions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the benchmark as a child process; return its exit status."""
    if not (FOLDER / "__main__.py").is_file():
        message = (
            f"there are no benchmarks at {FOLDER}: they are part of the source checkout only; "
            "clone it and run `make setup` there"
        )
        raise CommandError(message)
    flags = ["--json"] if arguments.json else []
    if arguments.name is None or arguments.list:
        return _run_child(flags)
    flags += ["--quick"] if arguments.quick else []
    return _run_child([arguments.name, *flags, *arguments.options])


def _run_child(argv: list[str]) -> int:
    # -P: a file in the user's folder must not take the place of a module.
    command = [sys.executable, "-P", "-m", FOLDER.name, *argv]
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(command, env=environment) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.wait()  # the terminal told it as well
            message = "interrupted"
            raise CommandError(message) from None
        finally:
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else FAILED
