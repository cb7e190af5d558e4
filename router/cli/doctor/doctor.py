"""`macfabric doctor`: check whether this machine can run a fabric."""

import argparse
import os
import platform
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import fabric
from fabric.errors import FabricError, FatalError
from fabric.hosting.cluster_file import fabric_section
from fabric.keys import CLUSTER_FILE_KEYS, CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN, SHIPPED_KEYS
from fabric.limits import GIB, MIB
from fabric.memory_plan import MachineMemory, plan_memory
from fabric.retention import disk_capacity_bytes
from fabric.sampling_defaults import BUILT_IN_SOURCE
from fabric.settings import FabricSettings, parse_settings
from router.cli.config_file import read_cluster_file
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.doctor.doctor_links import link_checks, link_rows, stations_of
from router.cli.doctor.doctor_mac import mac_checks
from router.cli.doctor.doctor_network import network_checks, run
from router.cli.doctor.finding import Check
from router.cli.doctor.import_check import foreign_names
from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import FAILED, MISUSED, CommandError
from router.cli.keys import AUTHORITY_KEY, KeyFolder
from router.cli.model_choice import weights_bytes
from router.cli.output import human_bytes
from router.cli.terminal import print_json, print_line
from router.client.http_api import ClientError
from router.supervise.ray_processes import SOCKET_PATH_BYTES_MAX, SOCKET_SUFFIX_BYTES
from router.tls.authority import RENEW_BEFORE, Subject, expires_at

_NO_SUBJECT = Subject(frozenset(), frozenset())


def key_checks(data: Path, now: datetime) -> Iterator[Check]:
    """Yield the checks of every key folder on this machine."""
    created, shipped = Path(CLUSTER_FILE_KEYS).expanduser(), Path(SHIPPED_KEYS).expanduser()
    folders = [KeyFolder.in_data(data), KeyFolder(created, created.parent / AUTHORITY_KEY)]
    for keys in (*folders, KeyFolder(shipped, shipped / AUTHORITY_KEY)):
        if keys.certificate.exists():
            yield _check(keys, now)


def _check(keys: KeyFolder, now: datetime) -> Check:
    name = f"keys in {keys.path}"
    secret = [keys.path / file for file in (CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN)]
    for path in (*secret, keys.authority_key):
        if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Check(name, "error", f"{path} can be read by others; run `chmod 600` on it")
    why = keys.renewal_reason(_NO_SUBJECT, now)
    if why is None:
        ends = expires_at(keys.certificate.read_bytes())
        return Check(name, "ok", f"the certificate is valid until {ends:%Y-%m-%d}")
    # A certificate that ends soon still works; one that has ended or does not match does not.
    still_serves = keys.renewal_reason(_NO_SUBJECT, now - RENEW_BEFORE) is None
    remedy = "`macfabric certs rotate` replaces it; `macfabric up` does so by itself"
    return Check(name, "warning" if still_serves else "error", f"{why}; {remedy}")


PACKAGES = ("ray", "mlx", "mlx-lm", "aiohttp", "uvicorn")
TESTED_RAY = "2.60"
ROOM_BYTES_LEAST = 10 * GIB
OPEN_FILES_MIN = 4_096
MACOS_MIN = (14, 0)
NODES_TIMEOUT_S = 5.0
_SMALL_MAC_BYTES = 36 * GIB


def add_doctor(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        description="Check whether this machine can run a fabric, and report the paths between "
        "the nodes of the running one. Changes nothing. Exit status 1 if there is an error; "
        "warnings do not count.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="use the settings of this cluster.yaml (default: those of the data folder)",
    )
    add_fabric_options(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run and print all checks."""
    report = examine(arguments)
    if arguments.json:
        print_json(report)
    else:
        for check in report["checks"]:
            print_line(f"{check['verdict']:7}  {check['name']}: {check['detail']}")
    return 0 if report["ok"] else FAILED


def examine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all checks; return them, the paths between nodes, and whether nothing is wrong."""
    folder = (arguments.data or default_data_dir()).expanduser()
    nodes, fabric_found = check_fabric(arguments)
    stations = stations_of(nodes)
    keys = key_checks(folder, datetime.now(UTC))
    settings = settings_of(arguments.config, folder)
    models = [*template_checks(nodes), *sampling_checks(nodes)]
    found = [fabric_found, *models, *link_checks(stations)]
    checks = [*machine_checks(folder, settings), *keys, *found]
    is_fine = all(check.verdict != "error" for check in checks)
    rows = [asdict(check) for check in checks]
    return {"ok": is_fine, "checks": rows, "links": link_rows(stations)}


def settings_of(file: Path | None, folder: Path) -> FabricSettings:
    """Return the settings of a cluster file, or of the data folder's last fabric."""
    if file is not None:
        try:
            return parse_settings(fabric_section(read_cluster_file(file)))
        except FabricError as error:
            raise CommandError(error.message, MISUSED) from None
    with suppress(CommandError, FabricError):  # no fabric has run here
        return parse_settings(fabric_section(read_cluster_file(DataFolder(folder).config)))
    return FabricSettings()


def machine_checks(folder: Path, settings: FabricSettings) -> Iterator[Check]:
    """Yield the checks of this machine."""
    looks: tuple[Callable[[], Check], ...] = (_python, _system, _names, _ray, _files)
    for look in looks:
        yield look()
    yield from _packages()
    yield _memory(settings)
    yield _disk(folder, settings.node.disk_bytes)
    yield _sockets(folder)
    yield _ray_variables(dict(os.environ))
    yield from network_checks()
    if sys.platform == "darwin":
        yield from mac_checks(run, folder, memory_bytes())


def check_fabric(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], Check]:
    """Check the running fabric, if there is one; return its nodes, too."""
    try:
        client = replace(fabric_of(arguments), timeout_s=NODES_TIMEOUT_S)
        nodes, urls = client.nodes(), client.health().get("urls") or [client.url]
    except (CommandError, ClientError) as error:
        return [], Check("fabric", "ok", f"no fabric to check: {error}")
    failed = [
        str(n.get("name")) for n in nodes if not (n.get("self_test") or {}).get("passed", True)
    ]
    links = ", ".join(f"{node.get('name')}: {_links(node) or 'no links'}" for node in nodes)
    if failed:
        detail = f"the cache self-test failed on {', '.join(failed)}; {links}"
        return nodes, Check("fabric", "error", detail)
    return nodes, Check("fabric", "ok", f"at {' and '.join(urls)}; {links or 'no nodes'}")


def template_checks(nodes: list[dict[str, Any]]) -> Iterator[Check]:
    """Yield the nodes' warnings about their models' chat templates."""
    for node in nodes:
        if node.get("template_warning"):
            yield Check(f"template on {node.get('name')}", "warning", node["template_warning"])


def sampling_checks(nodes: list[dict[str, Any]]) -> Iterator[Check]:
    """Yield how requests that leave sampling fields out are sampled, by model."""
    shown: dict[str, set[str]] = {}
    for node in nodes:
        fields = node.get("sampling") or {}
        chosen = [
            f"{name} {field['value']:g} ({field['source']})"
            for name, field in fields.items()
            if field["source"] != BUILT_IN_SOURCE
        ]
        if fields:
            shown.setdefault(str(node.get("model")), set()).add(", ".join(chosen) or "built in")
    for model, defaults in sorted(shown.items()):
        verdict = "ok" if len(defaults) == 1 else "warning"
        detail = " or ".join(sorted(defaults))
        if verdict == "warning":
            detail += ": the nodes differ, copy the model's files and settings to all of them"
        yield Check(f"sampling of {model}", verdict, detail)


def _links(node: dict[str, Any]) -> str:
    rows = node.get("addresses") or []
    return " ".join(
        f"{a.get('kind')} {a.get('host')}"
        + (f" {a['speed_mbit']} Mbit/s" if a.get("speed_mbit") else "")
        for a in rows
    )


def _python() -> Check:
    version = platform.python_version()
    if sys.flags.optimize:
        return Check(
            "python",
            "error",
            f"{version} runs with -O: start it without, as assertions guard caches",
        )
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Check("python", "ok" if fits else "error", f"{version}; 3.11 to 3.13 are supported")


def _system() -> Check:
    if sys.platform != "darwin":
        return Check("system", "ok", f"{platform.system()}: MLX computes on the CPU here")
    version = platform.mac_ver()[0]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if platform.machine() != "arm64" or numbers < MACOS_MIN:
        return Check("system", "error", f"macOS {version} {platform.machine()}; 14 on arm64 needed")
    return Check("system", "ok", f"macOS {version} on Apple Silicon")


def _names() -> Check:
    foreign = foreign_names()
    if foreign:
        return Check("names", "error", f"another package has taken {', '.join(foreign)}")
    return Check("names", "ok", f"fabric, node and router are macfabric {fabric.__version__}")


def _packages() -> Iterator[Check]:
    for name in PACKAGES:
        try:
            yield Check(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, "error", "is not installed (`make setup`)")


def _ray() -> Check:
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return Check("Ray's version", "error", "Ray is not installed")
    tested = version.startswith(TESTED_RAY)
    detail = f"{version}; tested with {TESTED_RAY}"
    return Check("Ray's version", "ok" if tested else "warning", detail)


def memory_bytes() -> int:
    """Return how much RAM this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory(settings: FabricSettings) -> Check:
    machine = MachineMemory(
        memory_bytes(), _gpu_bytes(), nodes_count=max(1, len(settings.local_nodes))
    )
    weights = weights_bytes(settings.model)
    try:
        plan = plan_memory(machine, weights or 0, settings.node.hot_bytes)
    except FatalError as error:
        return Check("memory", "error", error.message)
    unknown = "" if weights else f" (the weights of {settings.model} are not here, and not counted)"
    return Check("memory", "ok", f"{human_bytes(machine.ram_bytes)}; {plan.explanation}{unknown}")


def _gpu_bytes() -> int | None:
    """Return roughly what macOS recommends for GPU memory; a node asks the GPU itself.

    Source: Metal's `recommendedMaxWorkingSetSize`, two thirds of up to 36 GB and three quarters of
    more, unless `iogpu.wired_limit_mb` says otherwise.
    """
    if sys.platform != "darwin":
        return None
    text = run("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb").strip()
    if text.isdecimal() and int(text):
        return int(text) * MIB
    ram = memory_bytes()
    return ram * 2 // 3 if ram <= _SMALL_MAC_BYTES else ram * 3 // 4


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = soft >= OPEN_FILES_MIN
    detail = f"{soft} (hard limit {hard}); `ulimit -n 65536` raises it"
    return Check("open files", "ok" if fits else "warning", detail)


def _disk(folder: Path, disk_bytes: int) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    drive = shutil.disk_usage(existing)
    room = min(disk_bytes, disk_capacity_bytes(drive.total, drive.free, 0))
    fits = room >= min(disk_bytes, ROOM_BYTES_LEAST)
    detail = (
        f"{human_bytes(drive.free)} of {human_bytes(drive.total)} free for {folder}; agents may "
        f"take {human_bytes(room)} more (node.disk_bytes is {human_bytes(disk_bytes)}, "
        f"{human_bytes(drive.free - disk_capacity_bytes(drive.total, drive.free, 0))} stay free)"
    )
    if not os.access(existing, os.W_OK):
        return Check("disk", "error", f"cannot write to {existing}")
    return Check("disk", "ok" if fits else "warning", detail)


def _sockets(folder: Path) -> Check:
    room = SOCKET_PATH_BYTES_MAX - SOCKET_SUFFIX_BYTES - len(os.fsencode(folder / "ray"))
    if room >= 0:
        return Check("socket paths", "ok", f"{folder} is short enough for Ray's sockets")
    return Check("socket paths", "warning", f"{folder} is too long: Ray's files go to /tmp")


def _ray_variables(environment: dict[str, str]) -> Check:
    names = sorted(name for name in environment if name.startswith("RAY_"))
    if not names:
        return Check("RAY_ variables", "ok", "none are set")
    detail = f"{', '.join(names)}: `up` ignores them, `serve` and `ray up` obey them"
    return Check("RAY_ variables", "warning", detail)
