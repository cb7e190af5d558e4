"""`macfabric certs`: make and renew the keys and certificates of a fabric."""

import argparse
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fabric.errors import FabricError
from fabric.hosting.cluster_file import fabric_section
from fabric.keys import SHIPPED_KEYS
from fabric.settings import parse_settings
from router.cli.config_file import read_cluster_file
from router.cli.data_folder import DataFolder, default_data_dir, make_private_folder
from router.cli.errors import MISUSED, CommandError
from router.cli.keys import AUTHORITY_KEY, KeyFolder
from router.cli.terminal import print_json, print_line
from router.cli.up import own_subject
from router.tls.authority import Subject, expires_at

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_certs(commands: Any) -> None:
    """Declare the command."""
    certs = commands.add_parser("certs")
    verbs = certs.add_subparsers(metavar="VERB")
    create = verbs.add_parser(
        "create",
        help="make the keys that `ray up` needs; repeat it after adding addresses",
        description="Make the cluster's key, Ray's password, an authority and a certificate for "
        "the Macs of a cluster file, in the folder that it ships to them. Valid ones are "
        "kept.",
    )
    create.add_argument("file", type=Path, metavar="FILE", help="cluster.yaml")
    create.add_argument("--json", action="store_true", help="print JSON")
    create.set_defaults(run=run_create)
    rotate = verbs.add_parser(
        "rotate",
        help="replace the members' key and certificate, and Ray's password",
        description="Replace the members' key and certificate and Ray's password: for the Macs of "
        "a cluster file, which the next `ray up` restarts with the new ones; without FILE, for the "
        "fabric in DIR, which must not be running. This cannot be undone. The cluster's key stays: "
        "stored agents depend on it.",
    )
    rotate.add_argument("file", type=Path, metavar="FILE", nargs="?", help="cluster.yaml")
    rotate.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    rotate.add_argument(
        "--authority",
        action="store_true",
        help="also make a new authority; clients that trust the old one need the new ca.pem",
    )
    rotate.add_argument("--json", action="store_true", help="print JSON")
    rotate.set_defaults(run=run_rotate)


def run_create(arguments: argparse.Namespace) -> int:
    """Make the keys that a cluster file's Macs lack."""
    keys, subject = cluster_keys(read_cluster_file(arguments.file), arguments.file)
    _own(keys)
    changes = [*keys.create(subject, datetime.now(UTC)), *keys.make_token(anew=False)]
    _tell(keys, changes, as_json=arguments.json)
    return 0


def run_rotate(arguments: argparse.Namespace) -> int:
    """Replace the members' keys."""
    now, anew = datetime.now(UTC), arguments.authority
    if arguments.file is not None:
        keys, subject = cluster_keys(read_cluster_file(arguments.file), arguments.file)
        _own(keys)
        changes = keys.rotate(subject, now, with_authority=anew)
        changes += keys.make_token(anew=True)
    else:
        folder = DataFolder((arguments.data or default_data_dir()).expanduser().resolve())
        folder.create()
        with folder.claimed():
            keys = folder.keys
            changes = keys.rotate(own_subject(), now, with_authority=anew)
    _tell(keys, changes, as_json=arguments.json)
    return 0


def cluster_keys(cluster: dict[str, Any], path: Path) -> tuple[KeyFolder, Subject]:
    """Return the folder of a cluster file's keys and the hosts of its certificate."""
    mounts = cluster.get("file_mounts")
    local = mounts.get(SHIPPED_KEYS) if isinstance(mounts, dict) else None
    provider = cluster.get("provider")
    provider = provider if isinstance(provider, dict) else {}
    workers = provider.get("worker_ips")
    hosts = [provider.get("head_ip"), *(workers if isinstance(workers, list) else [])]
    if not isinstance(local, str) or not all(isinstance(host, str) and host for host in hosts):
        message = f"{path} names no Macs, or does not ship a folder as {SHIPPED_KEYS}"
        raise CommandError(message, MISUSED)
    try:
        settings = parse_settings(fabric_section(cluster))
    except FabricError as error:
        message = f"{path}: {error.message}"
        raise CommandError(message, MISUSED) from None
    folder = Path(local).expanduser()
    router = settings.router
    names = [*_LOOPBACK, *router.tls.names, *router.allowed_hosts]
    named = [str(host) for host in hosts]
    subject = Subject.of([*names, *named, *(a for host in named for a in _addresses_of(host))])
    return KeyFolder(folder, folder.parent / AUTHORITY_KEY), subject


def _addresses_of(host: str) -> list[str]:
    """Resolve a host name: Ray connects to a Mac by its address."""
    try:
        return sorted({str(row[4][0]) for row in socket.getaddrinfo(host, None, socket.AF_INET)})
    except OSError as error:
        message = f"{host} cannot be resolved here ({error.strerror}): give its address instead"
        raise CommandError(message) from None


def _own(keys: KeyFolder) -> None:
    os.umask(0o077)
    try:
        make_private_folder(keys.path.parent)
        make_private_folder(keys.path)
    except OSError as error:
        message = f"{keys.path} cannot hold keys: {error.strerror}"
        raise CommandError(message) from None


def _tell(keys: KeyFolder, changes: list[str], *, as_json: bool) -> None:
    ends = expires_at(keys.certificate.read_bytes())
    if as_json:
        print_json({"folder": str(keys.path), "done": changes, "expires": ends.isoformat()})
        return
    for line in changes or ["nothing to do"]:
        print_line(line)
    print_line(f"the keys are in {keys.path}; the certificate is valid until {ends:%Y-%m-%d}")
