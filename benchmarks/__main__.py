"""Find the benchmarks of this folder and run one: `macfabric bench` starts it.

A benchmark is a file beside this one with a constant DESCRIPTION (one line), a function
`add_arguments(parser)` and a function `run(arguments) -> Report`; `arguments.quick` asks for a
run of seconds, which shows only that the benchmark works.
"""

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import as_record, print_record, show
from benchmarks.saved_results import options_shown, render_all, save
from router.cli.main import run_guarded
from router.cli.output import print_pairs

FOLDER = Path(__file__).resolve().parent
MISSED = 1
MISUSED = 2
QUICK_NOTE = "a run of seconds shows that the benchmark works; its limits are not judged"


def list_benchmarks() -> dict[str, str]:
    """Return the description of each benchmark by name, without importing it."""
    described = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DESCRIPTION":
                described[path.stem.replace("_", "-")] = str(ast.literal_eval(node.value))
    return described


def list_all(argv: Sequence[str]) -> int:
    """Print every benchmark with its description."""
    parser = argparse.ArgumentParser(prog="macfabric bench", description="List the benchmarks.")
    parser.add_argument("--list", action="store_true", help="(the default)")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="render all results of the folder again",
    )
    arguments = parser.parse_args(argv)
    if arguments.report is not None:
        print("\n".join(render_all(arguments.report)))
        return 0
    if arguments.json:
        print_record(list_benchmarks())
    else:
        print_pairs(list_benchmarks().items())
    return 0


def run_one(name: str, argv: Sequence[str]) -> int:
    """Run a benchmark; return exit status 1 if a full run misses a limit."""
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"macfabric bench {name}", description=f"{name}: {module.DESCRIPTION}."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="also write the result there, as JSON, Markdown and PNG",
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(argv)
    report = module.run(arguments)
    if arguments.quick:
        report = replace(report, is_judged=False, notes=(*report.notes, QUICK_NOTE))
    record = as_record(name, report, options_shown(argv))
    if arguments.json:
        print_record(record)
    else:
        show(name, report)
    if arguments.report is not None:
        save(record, arguments.report)
    return MISSED if report.met is False else 0


def main(argv: Sequence[str]) -> int:
    """Run the command line; without a name, list the benchmarks."""
    if not argv or argv[0].startswith("-"):
        return list_all(argv)
    name, *rest = argv
    name = name.replace("_", "-")
    names = list_benchmarks()
    if name not in names:
        print(f"no benchmark {name!r}; there are: {', '.join(names)}", file=sys.stderr)
        return MISUSED
    return run_one(name, rest)


if __name__ == "__main__":
    status = run_guarded(lambda: main(sys.argv[1:]))
    sys.stderr.flush()
    # Python's normal exit often aborts soon after a thread that used MLX has ended.
    os._exit(status)
