"""`macfabric uninstall`: remove what macfabric has written on this machine; list what remains."""

import argparse
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fabric
from fabric.hosting.cluster_file import fabric_section
from fabric.keys import (
    AUTHORITY_CERTIFICATE,
    CLUSTER_FILE_KEYS,
    CLUSTER_KEY,
    MEMBER_CERTIFICATE,
    MEMBER_KEY,
    RAY_TOKEN,
)
from router.cli.config_file import read_cluster_file
from router.cli.confirmation import require_typed
from router.cli.data_folder import (
    DEMO_PREFIX,
    WATCH_KEY,
    DataFolder,
    default_data_dir,
    size_of,
)
from router.cli.doctor.doctor_network import run
from router.cli.errors import FAILED, CommandError, describe_os_error
from router.cli.keys import AUTHORITY_KEY, KEY_BYTES
from router.cli.output import human_bytes, print_table
from router.cli.service.installed import UnitFile, installed_units, remove_unit
from router.cli.terminal import print_json, print_line
from router.limits import FILES_COUNTED_MAX
from router.supervise.processes import is_alive, session_members
from router.supervise.ray_member import shipped_member
from router.supervise.ray_processes import SHORT_DIR_PREFIX

WORD: Final = "uninstall"  # to be typed
NODES: Final = "nodes"
VOTE: Final = "voter.json"  # of `macfabric voter`
# Everything that macfabric writes into a data folder; other files in it are kept.
_KEYS: Final = (
    *(CLUSTER_KEY, AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE, MEMBER_KEY, RAY_TOKEN),
    *(AUTHORITY_KEY, WATCH_KEY, "operator.key"),
)
_RECORDS: Final = (
    *("config.yaml", "endpoint.json", "run.json", "stop.json", "stopping.json"),
    *("roster.json", "settings.json", "upgrade.json", "usage.json", VOTE, "lock"),
)
_FOLDERS: Final = ("logs", "runs", "scenarios", "launch", "ray")
_CACHES: Final = ("tmp", "hf")
_TEMPORARY: Final = Path("/tmp")  # noqa: S108 - only our own folders of these names
_TEMPORARIES: Final = {
    SHORT_DIR_PREFIX: "sockets of a fabric that crashed",
    DEMO_PREFIX: "data of a demo that failed",
}
_SSH_KEYS: Final = ("~/.ssh/macfabric", "~/.ssh/macfabric.pub")
_RAY_COPIES: Final = ("~/ray_bootstrap_key.pem", "~/ray_bootstrap_config.yaml")
# What cluster.yaml and `macfabric ray start` put into a Mac's folder.
_MEMBER: Final = ("app", "venv", "keys", "ray", "gcs", "logs", "started", "serve.pid")


@dataclass(frozen=True, slots=True)
class Leftover:
    """File, folder or unit that an uninstall removes."""

    what: str
    path: Path
    unit: UnitFile | None = None


def add_uninstall(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "uninstall",
        description="List data folders, keys, units, caches and Ray's leftovers of macfabric on "
        "this machine, and remove them after you have typed a word. Stored agents are lost with "
        "them, and without a backup of cluster.key so are copies of them: see `macfabric backup`. "
        "This cannot be undone. Symbolic links are removed, never followed. The checkout "
        "stays.",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    parser.add_argument(
        "--keep-agents", action="store_true", help="keep stored agents and the keys they need"
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; without --yes, nothing is removed"
    )
    parser.set_defaults(run=run_uninstall)


def run_uninstall(arguments: argparse.Namespace) -> int:
    """List, ask, and remove."""
    data = DataFolder((arguments.data or default_data_dir()).expanduser().absolute())
    leftovers = list(find_leftovers(data, keeps_agents=arguments.keep_agents))
    remaining = find_remaining(data, keeps_agents=arguments.keep_agents)
    if arguments.json and not arguments.yes:
        return _report(arguments, leftovers, [], {}, remaining)
    if not arguments.json:
        _print_leftovers(leftovers)
    if not leftovers:
        return _report(arguments, leftovers, [], {}, remaining)
    with ExitStack() as stack:
        require_stopped(data, stack)
        if not arguments.yes:
            require_typed(WORD, "remove all of it")
        removed, failed = [], {}
        for leftover in leftovers:
            try:
                remove(leftover)
                removed.append(leftover)
            except (OSError, CommandError) as error:
                why = describe_os_error(error) if isinstance(error, OSError) else str(error)
                failed[str(leftover.path)] = why
        for folder in (data.path, shipped_member().folder):
            _remove_empty(folder)
    return _report(arguments, leftovers, removed, failed, remaining)


# --- what there is -----------------------------------------------------------------------------


def find_leftovers(data: DataFolder, *, keeps_agents: bool) -> Iterator[Leftover]:
    """Yield everything that an uninstall removes, units first: they would restart a fabric."""
    for unit in installed_units():
        if not unit.is_system:
            yield Leftover(f"{unit.kind} unit", unit.path, unit)
    yield from _of_data(data.path, keeps_agents=keeps_agents)
    if not keeps_agents:
        yield from _present("keys of a cluster file", Path(CLUSTER_FILE_KEYS).expanduser().parent)
    yield from _of_member(shipped_member().folder, keeps_agents=keeps_agents)
    for prefix, what in _TEMPORARIES.items():
        for path in sorted(_TEMPORARY.glob(f"{prefix}*")):
            if _is_own_folder(path) and not _commands_with(str(path)):
                yield Leftover(what, path)
    for name in _RAY_COPIES:
        yield from _present("copy that Ray made for the head", Path(name).expanduser())
    for name in _SSH_KEYS:
        yield from _present("ssh key for the Macs", Path(name).expanduser())
    for path in compiled_files():
        yield from _present("compiled files", path)


def compiled_files() -> list[Path]:
    """List the files compiled by `make setup`, unless the environment is a link to another one."""
    prefix = Path(sys.prefix)
    if prefix.resolve() != prefix or prefix.parent != _source():
        return []
    return [prefix / "compiled", Path(sysconfig.get_path("purelib")) / "compiled.pth"]


def _source() -> Path:
    return Path(fabric.__file__).resolve().parents[1]


def _of_member(path: Path, *, keeps_agents: bool) -> Iterator[Leftover]:
    """Yield the files that `ray up` put on this Mac; the same folder may hold a checkout."""
    if path.is_symlink() or not (path / "app/router").is_dir():
        return
    for name in _MEMBER:
        is_kept = name == "keys" and keeps_agents
        if not is_kept and not Path(sys.prefix).is_relative_to(path / name):
            yield from _present("this Mac as a member of a cluster", path / name)


def _of_data(path: Path, *, keeps_agents: bool) -> Iterator[Leftover]:
    """Yield the parts of a data folder that is ours; a link to one is not followed."""
    if path.is_symlink() or not path.is_dir() or not _is_ours(path):
        return
    for name in (*_RECORDS, *_FOLDERS, *_CACHES):
        yield from _present("cache" if name in _CACHES else "records", path / name)
    if keeps_agents:
        return
    yield from _present("stored agents", path / NODES)
    for name in _KEYS:
        yield from _present("key", path / name)


def _is_ours(path: Path) -> bool:
    """Return whether a folder is a fabric's data: it has its key, its settings or a node."""
    if path in (Path.home(), Path("/")):
        return False
    has_key, has_settings = False, False
    with suppress(OSError, ValueError):
        has_key = len(bytes.fromhex((path / CLUSTER_KEY).read_text())) == KEY_BYTES
    with suppress(CommandError):
        has_settings = fabric_section(read_cluster_file(path / "config.yaml")) is not None
    has_vote = (path / VOTE).is_file()
    return has_key or has_settings or has_vote or any(path.glob(f"{NODES}/*/identity"))


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()


def _present(what: str, path: Path) -> Iterator[Leftover]:
    if path.exists() or path.is_symlink():
        yield Leftover(what, path)


def find_remaining(data: DataFolder, *, keeps_agents: bool) -> list[str]:
    """List what an uninstall does not remove, and how to remove it."""
    source = _source()
    remaining = [f"the program: rm -r {source}, and its virtual environment {sys.prefix}"]
    path = data.path
    if path.is_symlink():
        remaining.append(f"{path}: a link to {path.resolve()}, which is kept")
    elif path.is_dir() and not _is_ours(path):
        remaining.append(f"{path}: does not look like the data of a fabric")
    elif path.is_dir():
        known = {*_KEYS, *_RECORDS, *_FOLDERS, *_CACHES, NODES, "cluster"}
        if others := sorted(each.name for each in path.iterdir() if each.name not in known):
            remaining.append(f"in {path}, not written by macfabric: {', '.join(others)}")
        if keeps_agents and (path / NODES).exists():
            remaining.append(f"stored agents in {path / NODES}, and the keys beside them")
        links = [each for each in path.glob(f"{NODES}/*") if each.is_symlink()]
        remaining += [f"{each}: a link to {each.resolve()}, which is kept" for each in links]
    remaining += [
        f"{unit.path}: sudo {sys.argv[0]} service uninstall {unit.role} --kind {unit.kind} --system"
        for unit in installed_units()
        if unit.is_system
    ]
    remaining.append(
        "on other machines: their own data, `ca.pem` at clients, and the line of the ssh key in "
        "~/.ssh/authorized_keys; run `macfabric uninstall` on each Mac"
    )
    return remaining


def require_stopped(data: DataFolder, stack: ExitStack) -> None:
    """Keep a fabric from running while files are removed; raise CommandError if one runs."""
    if data.path.is_dir() and not data.path.is_symlink() and _is_ours(data.path):
        up, processes = data.read_run()
        if (up is not None and is_alive(up)) or session_members(processes.values()):
            message = f"A fabric is running in {data.path}. Stop it first with `macfabric down`."
            raise CommandError(message)
        stack.enter_context(data.claimed())
    if any(_commands_with(f"--data-dir {path} ") for path in (data.path, data.path.resolve())):
        message = f"A router or voter runs on {data.path}. Stop it first."
        raise CommandError(message)
    member = shipped_member()
    if member.is_running():
        message = (
            f"Ray or the router of {member.folder} is running. Stop it first with `macfabric down "
            "--config cluster.yaml`."
        )
        raise CommandError(message)


def _commands_with(text: str) -> list[str]:
    """List the running commands that contain a text."""
    listed = run("/bin/ps", "-axwwo", "command=").splitlines()
    return [line for line in listed if text in f"{line} "]


# --- removal -----------------------------------------------------------------------------------


def remove(leftover: Leftover) -> None:
    """Remove a file, folder or unit; of a link, only the link."""
    path = leftover.path
    if leftover.unit is not None:
        remove_unit(leftover.unit)
    elif path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)  # refuses a link, and removes links within


def _remove_empty(path: Path) -> None:
    """Remove a data folder that is empty now."""
    if not path.is_symlink():
        with suppress(OSError):
            path.rmdir()


# --- output ------------------------------------------------------------------------------------


def _print_leftovers(leftovers: list[Leftover]) -> None:
    rows = [
        (
            each.what,
            human_bytes(size_of(each.path, FILES_COUNTED_MAX)[1]),
            f"{each.path}{_link(each.path)}",
        )
        for each in leftovers
    ]
    if rows:
        print_table("To be removed", ("what", "size", "path"), rows)
    else:
        print_line("there is nothing to remove")


def _link(path: Path) -> str:
    return " (a link; only it is removed)" if path.is_symlink() else ""


def _report(
    arguments: argparse.Namespace,
    leftovers: list[Leftover],
    removed: list[Leftover],
    failed: dict[str, str],
    remaining: list[str],
) -> int:
    status = FAILED if failed else 0
    if arguments.json:
        rows = [{"what": each.what, "path": str(each.path)} for each in leftovers]
        paths = [str(each.path) for each in removed]
        print_json({"found": rows, "removed": paths, "failed": failed, "remaining": remaining})
        return status
    for path, why in failed.items():
        print_line(f"not removed: {path}: {why}")
    if removed:
        print_line(f"removed {len(removed)} of {len(leftovers)}")
    for line in remaining:
        print_line(f"remains: {line}")
    return status
