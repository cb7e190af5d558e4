"""`macfabric support-bundle`: write a bundle for a maintainer, and list its contents."""

import argparse
import io
import os
import secrets
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import fabric
from fabric.keys import CLUSTER_FILE_KEYS, CLUSTER_KEY, SHIPPED_KEYS
from fabric.limits import MIB
from fabric.settings import FabricSettings
from router.cli.config_file import with_key_files
from router.cli.data_folder import WATCH_KEY, DataFolder, default_data_dir
from router.cli.doctor.doctor import settings_of
from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.cli.keys import AUTHORITY_KEY
from router.cli.output import human_bytes, print_table
from router.cli.support.aliases import Aliases
from router.cli.support.secrets import Secrets
from router.cli.support.sources import BundleContext, BundlePart, dump, parts_of
from router.cli.terminal import print_error, print_json, print_line
from router.client.client import Fabric
from router.client.http_api import ClientError
from router.limits import (
    SUPPORT_BUNDLE_BYTES_MAX,
    SUPPORT_ENTRY_BYTES_MAX,
    SUPPORT_LOG_MIB,
    SUPPORT_LOG_MIB_MAX,
)

CONTENTS: Final = "contents.json"
TIMEOUT_S: Final = 10.0  # of one request to the fabric, which may hang
_KEYS: Final = (AUTHORITY_KEY, WATCH_KEY, "operator.key")
_ABSENT: Final = (
    "prompts, answers, weights and stored caches (never read)",
    "keys, tokens and passwords (removed, and searched for afterwards)",
    "texts of exceptions, and lines of unknown form in logs",
)
_NAMES: Final = "ids of agents, names of tenants, nodes, hosts and users: aliases in their place"


def add_support_bundle(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "support-bundle",
        description="Write one tar.gz with versions, the machine, `doctor`, the fabric's state, "
        "metrics, recent events, settings without keys, and the ends of logs; list what is in it. "
        "Works with and without a running fabric. It holds no prompts, keys, tokens or weights. "
        "Names of agents, tenants, nodes and hosts are replaced by aliases that stay the same in "
        "the next bundle of this fabric.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        nargs="?",
        help="file to write (default: macfabric-support-DATE.tar.gz in this folder)",
    )
    parser.add_argument(
        "--with-names",
        action="store_true",
        help="keep the ids of agents and the names of tenants, nodes, hosts and users",
    )
    parser.add_argument(
        "--log-mib",
        type=int,
        metavar="N",
        default=SUPPORT_LOG_MIB,
        help=f"MiB from the end of each log (default: {SUPPORT_LOG_MIB})",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing FILE")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use this cluster.yaml")
    add_fabric_options(parser)
    parser.set_defaults(run=run_support_bundle)


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """File of a bundle as it is written."""

    name: str
    what: str
    raw: bytes
    notes: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return its line in the list of contents."""
        return {
            "name": self.name,
            "what": self.what,
            "bytes": len(self.raw),
            "notes": list(self.notes),
        }


def run_support_bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle and print its contents."""
    if not 0 <= arguments.log_mib <= SUPPORT_LOG_MIB_MAX:
        message = f"--log-mib must be 0 to {SUPPORT_LOG_MIB_MAX}"
        raise CommandError(message, MISUSED)
    now = datetime.now(UTC)
    target = arguments.file or Path(f"macfabric-support-{now:%Y%m%d-%H%M%S}.tar.gz")
    if target.exists() and not arguments.force:
        message = f"{target} exists already; --force replaces it"
        raise CommandError(message, MISUSED)
    folder = DataFolder((arguments.data or default_data_dir()).expanduser())
    settings = settings_of(arguments.config, folder.path)
    client, why_none = _fabric(arguments)
    aliases = Aliases(_alias_key(folder), keeps_names=arguments.with_names)
    log_bytes_max = arguments.log_mib * MIB
    context = BundleContext(arguments, folder, settings, client, aliases, log_bytes_max)
    scrubber = known_secrets(folder, settings, arguments.key)
    entries = cut_entries(clean_parts(list(parts_of(context)), aliases, scrubber))
    contents = {
        "written_at": now.isoformat(timespec="seconds"),
        "by": f"macfabric {fabric.__version__}",
        "fabric": "running" if client else why_none,
        "names": "kept" if arguments.with_names else "replaced by aliases",
        "not_in_it": [*_ABSENT, *([] if arguments.with_names else [_NAMES])],
        "entries": [entry.row() for entry in entries],
    }
    [head] = clean_parts([BundlePart(CONTENTS, "this list", contents)], aliases, scrubber)
    _write(target, [head, *entries], now)
    return _report(target, contents, as_json=arguments.json)


def known_secrets(folder: DataFolder, settings: FabricSettings, key: str | None) -> Secrets:
    """Collect all keys on this machine."""
    scrubber = Secrets()
    cluster_keys = Path(CLUSTER_FILE_KEYS).expanduser()
    for keys in (folder.path, cluster_keys, cluster_keys.parent, Path(SHIPPED_KEYS).expanduser()):
        scrubber.add_files(keys, _KEYS)
    router = settings.router
    try:
        router = with_key_files(settings).router
    except (CommandError, OSError) as error:
        print_error(f"warning: {error}; keys in that file are found by their form only")
    scrubber.add_settings(router.api_keys)
    scrubber.add_settings(router.operator_keys)
    scrubber.add_environment()
    scrubber.add(key)
    return scrubber


def clean_parts(
    parts: Iterable[BundlePart], aliases: Aliases, scrubber: Secrets
) -> list[BundleEntry]:
    """Return parts without secrets and names; leave out one that still holds a secret."""
    entries = []
    for part in parts:
        value = aliases.replace(scrubber.scrub_values(part.value))
        name = aliases.replace_in_text(part.name)
        notes = tuple(aliases.replace_in_text(scrubber.scrub(note)) for note in part.notes)
        entry = BundleEntry(name, part.what, dump(value).encode(errors="replace"), notes)
        if scrubber.is_in(entry.raw):
            why = "left out: it still contained a secret, which is a bug in macfabric"
            entry = replace(entry, raw=b"", notes=(*notes, why))
        entries.append(entry)
    return entries


def cut_entries(entries: Iterable[BundleEntry]) -> list[BundleEntry]:
    """Cut entries to what one, and all of them together, may take."""
    bounded, left_bytes = [], SUPPORT_BUNDLE_BYTES_MAX
    for entry in entries:
        is_log = entry.name.startswith("logs/")
        most = left_bytes if is_log else min(left_bytes, SUPPORT_ENTRY_BYTES_MAX)
        if len(entry.raw) > most:
            note = f"cut: {len(entry.raw) - most} bytes over the limit are left out"
            raw = entry.raw[len(entry.raw) - most :] if is_log else entry.raw[:most]
            entry = replace(entry, raw=raw, notes=(*entry.notes, note))  # noqa: PLW2901
        left_bytes -= len(entry.raw)
        bounded.append(entry)
    return bounded


def _fabric(arguments: argparse.Namespace) -> tuple[Fabric | None, str]:
    """Return the running fabric, or why none answers."""
    try:
        client = replace(fabric_of(arguments), timeout_s=TIMEOUT_S)
        client.health()
    except (CommandError, ClientError) as error:
        return None, str(error)
    return client, ""


def _alias_key(folder: DataFolder) -> bytes:
    """Derive the key of aliases from the fabric's own; without one, they differ each time."""
    for path in (
        folder.path,
        Path(CLUSTER_FILE_KEYS).expanduser(),
        Path(SHIPPED_KEYS).expanduser(),
    ):
        try:
            key = bytes.fromhex((path / CLUSTER_KEY).read_text())
        except (OSError, ValueError):
            continue
        return blake2b(digest_size=32, key=key[:64], person=b"mf-aliases").digest()
    return secrets.token_bytes(32)


def _write(target: Path, entries: Iterable[BundleEntry], now: datetime) -> None:
    """Write the file for its owner only, whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for entry in entries:
                member = tarfile.TarInfo(f"macfabric-support/{entry.name}")
                member.size, member.mode = len(entry.raw), 0o600
                member.mtime = int(now.timestamp())
                tar.addfile(member, io.BytesIO(entry.raw))
        partial.replace(target)
    except OSError as error:
        raise CommandError(describe_os_error(error, target)) from None
    finally:
        partial.unlink(missing_ok=True)


def _report(target: Path, contents: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json({"file": str(target), "file_bytes": target.stat().st_size} | contents)
        return 0
    rows = [
        (entry["name"], human_bytes(entry["bytes"]), "; ".join([entry["what"], *entry["notes"]]))
        for entry in contents["entries"]
    ]
    print_table("Contents", ("entry", "size", "what"), rows)
    print_line(f"{target}: {human_bytes(target.stat().st_size)}, readable by you alone")
    print_line(f"fabric: {contents['fabric']}")
    print_line("not in it: " + "; ".join(contents["not_in_it"]))
    print_line("Look at it before you send it: tar -xzf FILE unpacks it.")
    return 0
