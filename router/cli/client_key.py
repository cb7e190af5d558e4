"""API keys of clients that `macfabric up` takes from a file, the environment or its options."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fabric.errors import RejectedError
from fabric.ids import DEFAULT_TENANT
from fabric.keys import DIGEST_PREFIX, key_digest
from fabric.settings import RouterSettings, check_keys
from router.cli.config_file import keys_of_file, others_may_read
from router.cli.endpoint import KEY_VARIABLE
from router.cli.errors import MISUSED, CommandError, describe_os_error

_IN_SIGHT = (
    "any account on this machine can read --api-key in the list of processes: "
    f"use --api-key-file FILE or {KEY_VARIABLE}"
)


def add_key_options(parser: Any) -> None:
    """Declare the options."""
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the API key that clients send, or lines of TENANT: KEY (also: {KEY_VARIABLE})",
    )
    keys.add_argument("--api-key", metavar="KEY", help="the key, readable by other accounts")


def with_client_keys(
    router: RouterSettings, arguments: argparse.Namespace, say: Callable[[str], None]
) -> RouterSettings:
    """Add the keys of a command line; raise CommandError for an invalid one."""
    new_keys = _given_keys(arguments, say)
    twice = sorted(new_keys.keys() & router.api_keys.keys())
    if twice:
        message = f"router.api_keys has a key for tenant {twice[0]} already"
        raise CommandError(message, MISUSED)
    whole = replace(router, api_keys=router.api_keys | dict(new_keys))
    try:
        check_keys(whole)
    except RejectedError as error:
        raise CommandError(error.message, MISUSED) from None
    return whole


def _given_keys(arguments: argparse.Namespace, say: Callable[[str], None]) -> Mapping[str, str]:
    if arguments.api_key_file is not None:
        return _in_file(arguments.api_key_file.expanduser())
    # Processes started from here on must not inherit it.
    key, where = os.environ.pop(KEY_VARIABLE, ""), KEY_VARIABLE
    if arguments.api_key is not None:
        say(_IN_SIGHT)
        key, where = arguments.api_key, "--api-key"
    elif not key:
        return {}
    else:
        say(f"clients may send the key of {KEY_VARIABLE}")
    return {DEFAULT_TENANT: _digest(key, where)}


def _in_file(path: Path) -> Mapping[str, str]:
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise CommandError(describe_os_error(error, path), MISUSED) from None
    except UnicodeDecodeError as error:
        message = f"{path} is not a text file: {error}"
        raise CommandError(message, MISUSED) from None
    if any(c.isspace() for c in text):  # several words: tenants and their keys
        return keys_of_file(path)
    if others_may_read(path):
        message = f"{path} holds a key, and others may read it: chmod 600 {path}"
        raise CommandError(message, MISUSED)
    return {DEFAULT_TENANT: _digest(text, str(path))}


def _digest(key: str, where: str) -> str:
    """Return a key's digest, so that no file of ours holds the key."""
    try:
        key_digest(key)
    except RejectedError as error:
        message = f"{where}: {error.message}"
        raise CommandError(message, MISUSED) from None
    if key.startswith(DIGEST_PREFIX):
        return key
    return DIGEST_PREFIX + sha256(key.encode()).hexdigest()
