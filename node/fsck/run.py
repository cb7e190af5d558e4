"""Check of a node's stored data while it is not running: `python -m node.fsck.run --help`.

Needs no model: each folder has a spec of its blocks. Exit status: 0 sound (leftovers of a crash
are listed; the node's next start removes them), 1 problems found or left, 2 wrong usage, or the
folder is in use.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from fabric.errors import FatalError, RejectedError
from fabric.ids import parse_node_name
from fabric.shown_text import escape_block, escape_json, escape_line
from node.fsck.folder import FolderCheck, Progress
from node.fsck.report import FolderReport, Kind
from node.keys import read_cluster_key
from node.store.encrypted_disk import open_disk
from node.store.posix_disk import DiskError, PosixDisk

NODES: Final = "nodes"
FOLDER_CHARS: Final = 16  # hex digits of the fingerprint
PROGRESS_S: Final = 2.0
PROBLEMS, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        status = _check(_parser().parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # Python's own exit would fail on what is still buffered: it goes into a pipe instead.
        os.dup2(os.pipe()[1], sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _print_error(f"cannot write to standard output: {error.strerror}")
        return PROBLEMS
    return status


def _check(arguments: argparse.Namespace) -> int:
    """Check the folders and print the findings; return the exit status."""
    try:
        nodes = _nodes(arguments.data.expanduser(), arguments.node)
        key, why = _cluster_key((arguments.keys or arguments.data).expanduser())
        with ExitStack() as stack:
            folders = _claim_folders(nodes, stack, key)
            reports = [
                _check_folder(node, disk, key, repair=arguments.repair) for node, disk in folders
            ]
    except (FatalError, RejectedError) as error:
        _print_error(error.message)
        return MISUSED
    for report in reports if why else ():
        report.add(Kind.NO_KEY, "cluster.key", f"names are not checked: {why}")
    _print_reports(reports, as_json=arguments.json)
    return 0 if all(report.is_sound for report in reports) else PROBLEMS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="macfabric fsck", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the data folder")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="if cluster.key is elsewhere")
    parser.add_argument("--node", metavar="NAME", help="one node of it (default: all)")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="quarantine what is damaged, cut records to what is left, remove what none needs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _nodes(data: Path, name: str | None) -> list[Path]:
    """List the nodes' folders to check; raise FatalError if there is none."""
    try:
        if name is not None:
            folders = [data / NODES / parse_node_name(name)]
        else:
            folders = sorted(path for path in (data / NODES).iterdir() if path.is_dir())
    except OSError as error:
        message = f"{data / NODES}: no node has stored anything there ({error.strerror})"
        raise FatalError(message) from None
    if not folders or not all(path.is_dir() for path in folders):
        message = f"{data / NODES}: no node {name or ''} has stored anything there"
        raise FatalError(message)
    return folders


def _cluster_key(folder: Path) -> tuple[bytes | None, str | None]:
    """Return the cluster key, or None and the reason why there is none."""
    try:
        return read_cluster_key(folder), None
    except FatalError as error:
        return None, error.message


def _claim_folders(
    nodes: list[Path], stack: ExitStack, key: bytes | None
) -> list[tuple[str, PosixDisk]]:
    """Lock all folders before the check; raise FatalError if a node uses one."""
    claimed = []
    for node in nodes:
        for folder in _folders(node):
            try:
                # A check changes nothing; a repair reports wrong modes before it fixes them.
                disk = open_disk(folder, "full", key, keeps_modes=True)
                stack.callback(disk.close)
                disk.claim()
            except DiskError as error:
                message = f"{error.message}; stop the node first (`macfabric down`)"
                raise FatalError(message) from None
            claimed.append((node.name, disk))
    return claimed


def _folders(node: Path) -> Iterator[Path]:
    """Yield the folders of all models that a node has served."""
    for path in sorted(node.iterdir()):
        is_digest = len(path.name) == FOLDER_CHARS and set(path.name) <= set("0123456789abcdef")
        if is_digest and path.is_dir() and not path.is_symlink():
            yield path


def _check_folder(node: str, disk: PosixDisk, key: bytes | None, *, repair: bool) -> FolderReport:
    report = FolderReport(node, disk.root.name)
    try:
        FolderCheck(disk, report, key, repair=repair).run(_progress(f"{node}/{report.folder}"))
    except (DiskError, OSError) as error:
        report.add(Kind.UNREADABLE, ".", str(error))
    return report


def _progress(what: str) -> Progress:
    """Return a function that reports the progress of reading from time to time."""
    printed_s = time.monotonic()

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal printed_s
        now_s = time.monotonic()
        if now_s - printed_s >= PROGRESS_S:
            printed_s = now_s
            share = f"{100 * done_bytes // total_bytes} % of {total_bytes:,} bytes"
            _print_error(f"{what}: {share}")

    return report


def _print_reports(reports: list[FolderReport], *, as_json: bool) -> None:
    if as_json:
        sound = all(report.is_sound for report in reports)
        result = {"sound": sound, "folders": [report.to_json() for report in reports]}
        sys.stdout.write(escape_json(json.dumps(result, indent=2)) + "\n")
        return
    encoding = sys.stdout.encoding or "utf-8"
    for line in [line for report in reports for line in report.lines()] or ["nothing is stored"]:
        shown = escape_line(line).encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(f"{shown}\n")


def _print_error(message: str) -> None:
    sys.stderr.write(f"fsck: {escape_block(message)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
