"""Parts of a support bundle: each reads one source, or reports why that failed."""

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import fabric
from fabric.codec import to_plain
from fabric.errors import FabricError
from fabric.hosting.chip import chip_name
from fabric.keys import (
    AUTHORITY_CERTIFICATE,
    CLUSTER_FILE_KEYS,
    MEMBER_CERTIFICATE,
    SHIPPED_KEYS,
    is_plain,
)
from fabric.settings import FabricSettings
from router.cli.data_folder import DataFolder, read_json, size_of
from router.cli.doctor.doctor import examine, memory_bytes
from router.cli.doctor.doctor_network import run
from router.cli.errors import CommandError
from router.cli.setting_rows import without_secrets
from router.cli.support.aliases import AGENT, FIELDS, HOST, NODE, TENANT, Aliases
from router.cli.support.log_tails import is_log, read_log_tail
from router.cli.support.secrets import REMOVED
from router.client.client import Fabric
from router.client.http_api import ClientError
from router.limits import (
    FILES_COUNTED_MAX,
    SUPPORT_AGENTS_MAX,
    SUPPORT_FOLDERS_MAX,
    SUPPORT_LOGS_MAX,
    SUPPORT_PACKAGES_MAX,
)
from router.tls.authority import expires_at

_KEY_FIELDS: Final = ("api_keys", "operator_keys")
_BY_ID: Final = {**FIELDS, "id": AGENT}
_BY_NAME: Final = {**FIELDS, "name": NODE}
_AGENT_FIELDS: Final = frozenset(
    {
        *("id", "tenant", "alias", "group", "owner", "state", "epoch", "revision", "tokens"),
        *("blocks", "bytes", "durable", "last_match", "pinned", "pin_held", "exact_tokens"),
        *("busy", "tiers", "created_s", "used_s", "replicas", "erasing", "copies", "amortized"),
        "branches",
    }
)


@dataclass(frozen=True, slots=True)
class BundlePart:
    """Content of one file of a bundle."""

    name: str
    what: str
    value: Any  # plain data, or the text of a log
    notes: tuple[str, ...] = ()  # what is missing in it


@dataclass(slots=True)
class BundleContext:
    """Inputs of all parts of a bundle, and the names that they contain."""

    arguments: argparse.Namespace
    folder: DataFolder
    settings: FabricSettings
    fabric: Fabric | None
    aliases: Aliases
    log_bytes_max: int
    has_operator_access: bool = False  # whether the fabric shows what operators see
    nodes: list[dict[str, Any]] = field(default_factory=list)


def parts_of(context: BundleContext) -> Iterator[BundlePart]:
    """Yield all parts; one that fails holds the reason."""
    learn_names(context)
    for name, (what, source) in _SOURCES.items():
        try:
            yield BundlePart(name, what, source(context))
        except (ClientError, CommandError, FabricError, OSError, ValueError) as error:
            why = f"not available: {error}"
            yield BundlePart(name, what, {"problem": why}, (why,))
    yield from _logs(context)


def learn_names(context: BundleContext) -> None:
    """Learn all names that the settings have."""
    aliases, router, node = context.aliases, context.settings.router, context.settings.node
    aliases.learn_machine()
    limited = (*router.tenant_weights, *router.tenant_limits)
    for tenant in (*router.api_keys, *limited, *node.tenants):
        aliases.learn(TENANT, tenant)
    for name in router.operator_keys:
        aliases.learn("operator", name)
    urls = (*router.voters, context.settings.tracing.endpoint)
    hosts = (urlsplit(url).hostname for url in urls)
    for host in (router.host, *router.allowed_hosts, *router.tls.names, *hosts):
        aliases.learn(HOST, host)
    for name in context.settings.local_nodes:
        aliases.learn(NODE, name)
    for folder in _subfolders(context.folder.path / "nodes"):
        aliases.learn(NODE, folder.name)


# --- this machine ------------------------------------------------------------------------------


def _versions(_context: BundleContext) -> Any:
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    names = sorted(filter(None, installed), key=str.lower)[:SUPPORT_PACKAGES_MAX]
    source = Path(fabric.__file__).resolve().parents[1]
    commit = run("git", "-C", str(source), "rev-parse", "HEAD").strip()[:12]
    return {
        "macfabric": fabric.__version__,
        "commit": commit or None,
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in names},
    }


def _machine(_context: BundleContext) -> Any:
    return {
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "architecture": platform.machine(),
        "chip": chip_name(),
        "cores": os.cpu_count(),
        "ram_bytes": memory_bytes(),
        "load": os.getloadavg(),
        "variables": sorted(n for n in os.environ if n.startswith(("RAY_", "MACFABRIC_", "MLX_"))),
    }


def _doctor(context: BundleContext) -> Any:
    return examine(context.arguments)


def _settings(context: BundleContext) -> Any:
    """Return the settings in force, with the tenants' and operators' names but not their keys."""
    plain = to_plain(context.settings)
    for name in _KEY_FIELDS:
        keys = getattr(context.settings.router, name)
        plain["router"][name] = {owner: _form_of(key) for owner, key in keys.items()}
    for policy in plain["router"]["policies"]:
        policy["options"] = without_secrets(policy["options"], REMOVED)
    options = plain["node"]["template_options"]
    plain["node"]["template_options"] = without_secrets(options, REMOVED)
    return plain


def _form_of(key: str) -> str:
    return f"{REMOVED}: {'a key' if is_plain(key) else 'a digest'}"


def _certificates(context: BundleContext) -> Any:
    keys = [
        context.folder.path,
        *(Path(name).expanduser() for name in (CLUSTER_FILE_KEYS, SHIPPED_KEYS)),
    ]
    certificate = context.settings.router.tls.certificate
    files = [
        folder / name for folder in keys for name in (AUTHORITY_CERTIFICATE, MEMBER_CERTIFICATE)
    ]
    files += [Path(certificate).expanduser()] if certificate else []
    rows = []
    for path in files:
        if not path.exists():
            continue
        try:
            ends = expires_at(path.read_bytes())
            days = (ends - datetime.now(UTC)).days
            rows.append({"file": str(path), "expires": ends.isoformat(), "days_left": days})
        except (OSError, ValueError) as error:
            rows.append({"file": str(path), "problem": str(error)})
    return rows


def _disk(context: BundleContext) -> Any:
    """Return the sizes of the data folder's parts, and how full its drive is."""
    path = context.folder.path
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    drive = shutil.disk_usage(existing)
    row: dict[str, Any] = {"data": str(path), "exists": path.exists()}
    row["drive"] = {"total_bytes": drive.total, "free_bytes": drive.free}
    remaining_count, row["folders"] = FILES_COUNTED_MAX, []
    folders = [*_subfolders(path), *_subfolders(path / "nodes")]
    for folder in folders[:SUPPORT_FOLDERS_MAX]:
        count, size_bytes = size_of(folder, remaining_count)
        remaining_count -= count
        name = str(folder.relative_to(path))
        row["folders"].append({"folder": name, "files": count, "bytes": size_bytes})
    if remaining_count <= 0:
        row["problem"] = f"only the first {FILES_COUNTED_MAX} files were counted"
    return row


def _subfolders(path: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    return []


def _exits(context: BundleContext) -> Any:
    """Return how each node's process ended, from its node's report and from its folder."""
    marks = {
        folder.name: {
            name: value
            for name, value in read_json(folder / "running").items()
            if name in ("began_s", "seen_s", "kills", "cause")
        }
        for folder in _subfolders(context.folder.path / "nodes")
    }
    last = {
        str(node.get("name")): {
            name: value for name, value in (node.get("last_exit") or {}).items() if name != "lines"
        }
        for node in context.nodes
    }
    return {"last_exits": last, "marks_on_disk": marks}


# --- the fabric --------------------------------------------------------------------------------


def _require_fabric(context: BundleContext) -> Fabric:
    """Return the running fabric; raise CommandError without one."""
    if context.fabric is None:
        message = "no fabric answers"
        raise CommandError(message)
    return context.fabric


def _status(context: BundleContext) -> Any:
    client = _require_fabric(context)
    health, role = client.health(), client.router()
    context.has_operator_access = "version" in health
    context.aliases.learn_from(health, _BY_NAME)
    return {
        "url": client.url,
        "health": health,
        "router": role,
        "as_operator": context.has_operator_access,
    }


def _nodes(context: BundleContext) -> Any:
    context.nodes = _require_fabric(context).nodes()
    context.aliases.learn_from(context.nodes, _BY_NAME)
    for node in context.nodes:
        if isinstance(node.get("fingerprint"), str):
            node["fingerprint"] = node["fingerprint"][:16]
    return context.nodes


def _agents(context: BundleContext) -> Any:
    client = _require_fabric(context)
    all_tenants = {"tenant": "*"} if context.has_operator_access else {}
    rows = client.agents(SUPPORT_AGENTS_MAX, **all_tenants)
    context.aliases.learn_from(rows, _BY_ID)
    return [_without_texts(row) for row in rows]


def _without_texts(row: dict[str, Any]) -> dict[str, Any]:
    """Return an agent's row without what may quote its conversation: edits and directives."""
    kept_fields = {name: value for name, value in row.items() if name in _AGENT_FIELDS}
    return kept_fields | {
        f"{name}_count": len(row.get(name) or ()) for name in ("edits", "directives")
    }


def _events(context: BundleContext) -> Any:
    rows = []
    for event in _require_fabric(context).events("/v1/events?follow=false"):
        context.aliases.learn_from(event.data, _BY_ID)
        rows.append({"event": event.name, "data": event.data})
    return rows


def _decisions(context: BundleContext) -> Any:
    return _require_fabric(context).rows("/v1/placement/decisions")


def _metrics(context: BundleContext) -> Any:
    with _require_fabric(context).open("GET", "/metrics") as response:
        return response.read().decode("utf-8", "replace")


_SOURCES: Final[dict[str, tuple[str, Callable[[BundleContext], Any]]]] = {
    # The fabric first: its names must be known before anything is written.
    "status.json": ("health of the fabric and role of its router", _status),
    "nodes.json": ("nodes: states, memory, links, versions", _nodes),
    "agents.json": ("agents: sizes, owners, last matches", _agents),
    "events.json": ("the last events that the router keeps", _events),
    "decisions.json": ("the last decisions of placement", _decisions),
    "metrics.txt": ("metrics in Prometheus' format", _metrics),
    "versions.json": ("versions of macfabric, Python and packages", _versions),
    "machine.json": ("operating system, chip, memory, names of variables", _machine),
    "doctor.json": ("what `macfabric doctor` reports", _doctor),
    "settings.json": ("settings in force, without keys", _settings),
    "certificates.json": ("when certificates end", _certificates),
    "disk.json": ("what the data folder takes, and how full its drive is", _disk),
    "exits.json": ("how processes of nodes ended", _exits),
}


# --- logs --------------------------------------------------------------------------------------


def _logs(context: BundleContext) -> Iterator[BundlePart]:
    """Yield the ends of the newest logs."""
    folders = [context.folder.logs, Path(SHIPPED_KEYS).expanduser().parent / "logs"]
    log_files: list[tuple[float, Path]] = []
    for folder in folders:
        with suppress(OSError):
            logs = [path for path in folder.iterdir() if is_log(path) and not path.is_symlink()]
            log_files += [(path.stat().st_mtime, path) for path in logs if path.is_file()]
    for _, path in sorted(log_files, reverse=True)[:SUPPORT_LOGS_MAX]:
        name = f"logs/{'serve-' if path.parent == folders[1] else ''}{path.name}"
        try:
            tail = read_log_tail(path, context.log_bytes_max)
        except OSError as error:
            why = f"not available: {error.strerror}"
            yield BundlePart(name, "the end of a log", "", (why,))
            continue
        if not tail.text and not tail.lines_left_out:
            continue
        notes = []
        if tail.bytes_before:
            notes.append(f"the first {tail.bytes_before} bytes are left out")
        if tail.lines_left_out:
            notes.append(f"{tail.lines_left_out} lines of unknown form are left out")
        yield BundlePart(name, "the end of a log", tail.text, tuple(notes))


def dump(value: Any) -> str:
    """Write a part's value as text."""
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
