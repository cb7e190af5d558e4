"""`macfabric hibernate` and `resume`: write an agent to a file, and restore it."""

import argparse
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fabric.control.calls import NODE_HEADER
from fabric.control.hibernation_calls import (
    EPOCH_HEADER,
    REVISION_HEADER,
    SALT_HEADER,
    SIGNING_KEY_HEADER,
)
from fabric.record.hibernation_file import HibernationHeader, SignedWith, caller_signing_key
from router.cli.confirmation import add_confirmation, confirm_loss
from router.cli.endpoint import add_agent_id, add_fabric_options, agent_of, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.file_exchange import download, read_header, upload
from router.cli.keys import SALT_BYTES, signing_key
from router.cli.output import human_bytes, human_count, print_answer
from router.client.client import FabricAgent
from router.client.http_api import RefusedError

AGENT_EXISTS = "agent_exists"  # error code


def add_hibernation(commands: Any) -> None:
    """Declare the commands."""
    hibernate = commands.add_parser(
        "hibernate",
        description="Write an agent into one signed file, which holds its conversation in clear "
        "text. The agent stays; with --no-keep it is erased once the file is safe, which only "
        "`macfabric resume FILE` undoes.",
    )
    add_agent_id(hibernate)
    hibernate.add_argument("file", metavar="FILE", type=Path, help="file to write")
    hibernate.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the agent here as well (default), or erase it once the file is safe",
    )
    hibernate.add_argument("--force", action="store_true", help="replace an existing FILE")
    hibernate.set_defaults(run=run_hibernate)
    resume = commands.add_parser(
        "resume",
        description="Bring an agent back from its file. `macfabric erase ID` undoes it. With "
        "--replace, the agent of that name is lost, which cannot be undone.",
    )
    resume.add_argument("file", metavar="FILE", type=Path, help="file that `hibernate` wrote")
    resume.add_argument(
        "--as", dest="name", metavar="NEW", help="name of the agent (default: the one in the file)"
    )
    resume.add_argument(
        "--node", metavar="NODE", help="node to resume on (default: the least busy that fits)"
    )
    resume.add_argument(
        "--replace",
        action="store_true",
        help="replace an agent of that name; this cannot be undone, so on a terminal it asks first",
    )
    add_confirmation(resume)
    resume.set_defaults(run=run_resume)
    for parser in (hibernate, resume):
        parser.add_argument(
            "--key-file",
            type=Path,
            metavar="PATH",
            help="file whose key or passphrase signs FILE, for use on another fabric",
        )
        add_fabric_options(parser)


def run_hibernate(arguments: argparse.Namespace) -> int:
    """Store an agent's file; with --no-keep, erase the agent once the file is complete."""
    target: Path = arguments.file
    if target.exists() and not arguments.force:
        message = f"{target} exists already; --force replaces it"
        raise CommandError(message, MISUSED)
    agent = agent_of(arguments)
    headers, key = _signing_headers(arguments.key_file)
    header, answered = download(
        agent.fabric,
        f"{agent.path}/hibernate",
        headers,
        target,
        key_of=lambda _: caller_signing_key(key) if key is not None else None,
        quiet=arguments.json,
    )
    if not arguments.keep:
        _erase_if_unchanged(agent, answered)
    summary = {
        "id": arguments.id,
        "file": str(target),
        "node": answered.get(NODE_HEADER),
        "epoch": header.epoch,
        "revision": header.revision,
        "tokens": header.tokens_count,
        "blocks": header.blocks_count,
        "bytes": target.stat().st_size,
        "model": header.model,
        "fingerprint": header.fingerprint.hex(),
        "signed_with": header.signed_with.value,
        "kept": arguments.keep,
    }
    for_whom = "this fabric" if header.signed_with is SignedWith.FABRIC else "holders of the key"
    return print_answer(
        summary,
        [
            ("agent", arguments.id),
            ("file", f"{target}, {human_bytes(summary['bytes'])}, for {for_whom}"),
            ("tokens", human_count(header.tokens_count)),
            ("model", header.model),
            ("the agent", "is kept" if arguments.keep else "was erased here"),
        ],
        as_json=arguments.json,
    )


def run_resume(arguments: argparse.Namespace) -> int:
    """Send an agent's file and print where the agent lives now."""
    source: Path = arguments.file
    try:
        file = source.open("rb")
    except OSError as error:
        message = f"{source}: {error.strerror}"
        raise CommandError(message, MISUSED) from None
    with file:
        header = read_header(file)
        headers = _key_headers(header, arguments.key_file)
        query = {"replace": "true"} if arguments.replace else {}
        if arguments.node:
            query["node"] = arguments.node
        agent = fabric_of(arguments).agent(arguments.name or header.agent)
        if arguments.replace:
            confirm_loss(f"replace {agent.name}, if it exists", is_confirmed=arguments.yes)
        path = f"{agent.path}/resume" + (f"?{urlencode(query)}" if query else "")
        try:
            resumed = upload(agent.fabric, path, headers, file, quiet=arguments.json)
        except RefusedError as error:
            if error.code != AGENT_EXISTS:
                raise
            message = f"an agent is called {agent.name!r} already; use --replace, or --as ANOTHER"
            raise CommandError(message) from None
    received, reused = resumed.get("blocks_received"), resumed.get("blocks_reused")
    return print_answer(
        resumed,
        [
            ("agent", resumed.get("id")),
            ("node", resumed.get("node")),
            ("epoch", resumed.get("epoch")),
            ("tokens", human_count(resumed.get("tokens"))),
            ("blocks", f"{received}, {reused} of them already there"),
            ("bytes", human_bytes(resumed.get("bytes_received"))),
        ],
        as_json=arguments.json,
    )


def _signing_headers(key_file: Path | None) -> tuple[dict[str, str], bytes | None]:
    if key_file is None:
        return {}, None
    salt = secrets.token_bytes(SALT_BYTES)
    key = signing_key(key_file, salt)
    return {SIGNING_KEY_HEADER: key.hex(), SALT_HEADER: salt.hex()}, key


def _key_headers(header: HibernationHeader, key_file: Path | None) -> dict[str, str]:
    if header.signed_with is SignedWith.FABRIC:
        return {}
    if key_file is None:
        message = "the file is signed with a separate key; name the key file with --key-file"
        raise CommandError(message, MISUSED)
    return {SIGNING_KEY_HEADER: signing_key(key_file, header.salt).hex()}


def _erase_if_unchanged(agent: FabricAgent, answered: Any) -> None:
    """Erase the agent unless it had another turn since the file was written."""
    written = (answered.get(EPOCH_HEADER), answered.get(REVISION_HEADER))
    now = agent.show()
    if written != (str(now.get("epoch")), str(now.get("revision"))):
        message = "the file is complete, but the agent had another turn since and was not erased"
        raise CommandError(message)
    agent.erase()
