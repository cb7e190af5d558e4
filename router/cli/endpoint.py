"""The fabric that a command talks to: command-line options, address and keys."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fabric.keys import AUTHORITY_CERTIFICATE, CLUSTER_FILE_KEYS, SHIPPED_KEYS
from fabric.settings import is_loopback
from router.cli.data_folder import DataFolder, default_data_dir, read_json
from router.cli.errors import CommandError
from router.cli.terminal import print_error
from router.client.client import Fabric, FabricAgent
from router.client.http_api import Hints
from router.supervise.processes import is_alive

URL_VARIABLE: Final = "MACFABRIC_URL"
KEY_VARIABLE: Final = "MACFABRIC_API_KEY"
CA_VARIABLE: Final = "MACFABRIC_CA"
OPERATOR_KEY_VARIABLE: Final = "MACFABRIC_OPERATOR_KEY"
TIMEOUT_S: Final = 30.0
HINTS: Final = Hints(
    unreachable="Start one with `macfabric up`, or name it with --url or MACFABRIC_URL.",
    untrusted="Copy the ca.pem of the fabric's keys to this machine, "
    f"and put its path into {CA_VARIABLE}.",
    unauthorized=f"Put the key into {KEY_VARIABLE}.",
    forbidden=f"Put an operator's key into {OPERATOR_KEY_VARIABLE}, "
    f"a tenant's into {KEY_VARIABLE}.",
)
_KEY_WITHHELD: Final = (
    "The data folder's operator key is not sent where others could read it: set router.tls.mode to "
    f"auto, or put the key into {OPERATOR_KEY_VARIABLE} to send it all the same."
)


def add_agent_id(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names an agent."""
    parser.add_argument("id", metavar="ID", help="the agent, as `macfabric agents` lists it")


def add_fabric_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every command that talks to a fabric."""
    parser.add_argument("--url", help="the fabric's address (default: MACFABRIC_URL, or --data's)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    parser.add_argument(
        "--key",
        help="a tenant's or an operator's key; better in MACFABRIC_API_KEY and "
        "MACFABRIC_OPERATOR_KEY, as others on this machine can read command lines",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def agent_of(arguments: argparse.Namespace) -> FabricAgent:
    """Return the agent that the arguments name."""
    return fabric_of(arguments).agent(arguments.id)


def fabric_of(arguments: argparse.Namespace) -> Fabric:
    """Return the fabric that the options name; warn of a key that others can read."""
    fabric = find_fabric(arguments.url, arguments.data, arguments.key)
    if sends_key_unencrypted(fabric):
        print_error(
            f"warning: {fabric.url} does not use https: anyone who listens on the network can "
            "read the key that is sent there (see docs/security.md)"
        )
    return fabric


def find_fabric(url: str | None, data_dir: Path | None, key: str | None = None) -> Fabric:
    """Return the fabric that the options, the environment or the data folder name.

    Anyone who may read the data folder is an operator of the fabric that runs in it.
    """
    folder = DataFolder((data_dir or default_data_dir()).expanduser())
    remote = Fabric(
        (url or (None if data_dir else os.environ.get(URL_VARIABLE)) or "").rstrip("/"),
        key or os.environ.get(KEY_VARIABLE),
        os.environ.get(OPERATOR_KEY_VARIABLE),
        TIMEOUT_S,
        _authorities(folder),
        hints=HINTS,
    )
    record = read_json(folder.endpoint)
    local_url, certificate = record.get("url"), record.get("certificate")
    if remote.url and remote.url != local_url:
        return remote
    if not isinstance(local_url, str):
        raise CommandError(_explain_no_fabric(folder))
    local = replace(remote, url=local_url)
    if remote.operator_key is None:
        if is_unencrypted(local_url):
            return replace(local, hints=replace(HINTS, forbidden=_KEY_WITHHELD))
        local = replace(local, operator_key=folder.read_operator_key())
    if isinstance(certificate, str):  # the operator's own, which may not be for 127.0.0.1
        return replace(local, trusted=(Path(certificate),), checks_name=False)
    return local


def sends_key_unencrypted(fabric: Fabric) -> bool:
    """Return whether a key is sent to this fabric in clear text over a network."""
    return bool(fabric.key or fabric.operator_key) and is_unencrypted(fabric.url)


def is_unencrypted(url: str) -> bool:
    """Return whether others could read what is sent to a URL."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _explain_no_fabric(folder: DataFolder) -> str:
    starter, _ = folder.read_run()
    if starter is not None and is_alive(starter):
        return f"The fabric in {folder.path} is starting (process {starter.pid}); try again."
    return f"No fabric is running in {folder.path}. {HINTS.unreachable}"


def _authorities(folder: DataFolder) -> tuple[Path, ...]:
    """List the certificates on this machine that may vouch for a fabric."""
    if path := os.environ.get(CA_VARIABLE):
        return (Path(path).expanduser(),)
    candidates = (
        folder.keys.authority,
        Path(CLUSTER_FILE_KEYS).expanduser() / AUTHORITY_CERTIFICATE,
        Path(SHIPPED_KEYS).expanduser() / AUTHORITY_CERTIFICATE,
    )
    return tuple(path for path in candidates if path.exists())
