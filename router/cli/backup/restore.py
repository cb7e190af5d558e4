"""`macfabric restore`: bring agents, or a fabric's keys, back from a backup."""

import argparse
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fabric.control.hibernation_calls import SIGNING_KEY_HEADER
from fabric.errors import RejectedError
from fabric.record.hibernation_file import FrameReader, caller_signing_key
from router.cli.backup.backup import add_backup_options
from router.cli.backup.backup_folder import BackupAgent, BackupFolder, chunks_of
from router.cli.backup.key_material import KeyMaterial, read_material, write_keys
from router.cli.backup.progress import AgentResult, Results
from router.cli.backup.tenants import (
    TenantClients,
    missing_client_reason,
    reason_of,
    retry_refused,
    tenant_clients,
)
from router.cli.confirmation import add_confirmation, confirm_loss
from router.cli.data_folder import DataFolder, default_data_dir, make_private_folder
from router.cli.endpoint import fabric_of
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.cli.file_exchange import upload
from router.cli.hibernate import AGENT_EXISTS
from router.cli.terminal import print_json, print_line
from router.client.client import Fabric
from router.client.http_api import ClientError, RefusedError, UnreachableError

SKIP: Final = "skip"
REPLACE: Final = "replace"


def add_restore(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "restore",
        description="Restore the agents of a backup on the running fabric, which may be another "
        "one that serves the same model. Agents that exist are skipped, so that an interrupted "
        "restore continues where it was. With --existing replace, they are replaced, and the turns "
        "that they had since the backup are lost, which cannot be undone: on a terminal it asks "
        "first. Exit status 1 if an agent could not be restored.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what `backup` wrote")
    parser.add_argument(
        "--agents", metavar="PATTERN", help="restore only agents whose id matches, such as 'team-*'"
    )
    parser.add_argument(
        "--existing",
        choices=(SKIP, REPLACE),
        default=SKIP,
        help="what to do with agents that exist already (default: skip)",
    )
    parser.add_argument(
        "--node", metavar="NODE", help="node to restore on (default: the least busy that fits)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        action="store_true",
        help="verify every file's checksum and signature, and restore nothing; needs no fabric",
    )
    instead.add_argument(
        "--keys-to",
        type=Path,
        metavar="DIR",
        help="only write the fabric's keys into DIR, such as a new data folder, before `up`",
    )
    add_confirmation(parser)
    add_backup_options(parser)
    parser.set_defaults(run=run_restore)


def run_restore(arguments: argparse.Namespace) -> int:
    """Restore agents, or check them, or restore the keys."""
    folder = BackupFolder(arguments.folder.expanduser())
    contents = folder.read()
    material = read_material(folder.keys, arguments.key_file)
    if arguments.keys_to is not None:
        return _restore_keys(material, arguments.keys_to.expanduser(), as_json=arguments.json)
    pattern = arguments.agents
    chosen = [a for a in contents.agents if pattern is None or fnmatchcase(a.id, pattern)]
    if arguments.check:
        with Results("checking", len(chosen), as_json=arguments.json) as results:
            for agent in chosen:
                results.add(_check(folder, agent, material))
        return _report(results, folder, contents.ended_at)
    data = DataFolder((arguments.data or default_data_dir()).expanduser())
    clients = tenant_clients(fabric_of(arguments), data, arguments.api_keys)
    query = {"node": arguments.node} if arguments.node else {}
    if arguments.existing == REPLACE:
        confirm_loss(
            f"replace those of {len(chosen)} agents that exist and lose their later turns",
            is_confirmed=arguments.yes,
        )
        query["replace"] = "true"
    restoring = _Restoring(folder, material, clients, urlencode(query))
    with Results("restoring", len(chosen), as_json=arguments.json) as results:
        for agent in chosen:
            results.add(restoring.restore(agent))
    return _report(results, folder, contents.ended_at)


def _report(results: Results, folder: BackupFolder, ended_at: str | None) -> int:
    lines = [] if ended_at else ["the backup was interrupted: it may lack agents"]
    summary = {"folder": str(folder.path), "backup_complete": ended_at is not None}
    return results.report(summary, lines, is_whole=True)


def _restore_keys(material: KeyMaterial, target: Path, *, as_json: bool) -> int:
    """Write the fabric's keys into a folder that has none."""
    if not material.files:
        message = "the backup has no keys, as its machine had none: restore without --keys-to"
        raise CommandError(message)
    os.umask(0o077)
    try:
        make_private_folder(target)
        written = write_keys(target, material.files)
    except OSError as error:
        raise CommandError(describe_os_error(error, target), MISUSED) from None
    if as_json:
        print_json({"folder": str(target), "written": written, "keys": sorted(material.files)})
        return 0
    print_line(f"wrote {', '.join(written)}" if written else "nothing to write: all keys exist")
    print_line(f"the keys are in {target}: start the fabric, then restore its agents")
    return 0


def _check(folder: BackupFolder, agent: BackupAgent, material: KeyMaterial) -> AgentResult:
    """Verify an agent's file against the list and its signature."""
    why = folder.damage_reason(agent)
    if why is None:
        reader = FrameReader(caller_signing_key(material.key))
        try:
            for chunk in chunks_of(folder.file_of(agent)):
                for _ in reader.feed(chunk):
                    pass
            reader.finish()
        except (RejectedError, OSError) as error:
            why = str(error)
    result = "sound" if why is None else "damaged"
    return AgentResult(agent.tenant, agent.id, result, agent.bytes, why=why)


@dataclass(slots=True)
class _Restoring:
    """Restorer of agents from a backup."""

    folder: BackupFolder
    material: KeyMaterial
    clients: TenantClients
    query: str
    _why_unreachable: str | None = None

    def restore(self, agent: BackupAgent) -> AgentResult:
        """Restore one agent and return the result."""
        client = self.clients.client(agent.tenant)
        if client is None:
            return self._failed_result(agent, missing_client_reason(agent.tenant))
        if self._why_unreachable is not None:
            return self._failed_result(agent, f"skipped: {self._why_unreachable}")
        if (why := self.folder.damage_reason(agent)) is not None:
            return AgentResult(agent.tenant, agent.id, "damaged", why=why)
        try:
            resumed = retry_refused(lambda: self._send(client, agent))
        except UnreachableError as error:
            self._why_unreachable = reason_of(error)
            return self._failed_result(agent, self._why_unreachable)
        except (ClientError, CommandError, OSError) as error:
            if isinstance(error, RefusedError) and error.code == AGENT_EXISTS:
                why = "exists already: replace it with --existing replace"
                return AgentResult(agent.tenant, agent.id, "skipped", why=why)
            return self._failed_result(agent, reason_of(error))
        return AgentResult(agent.tenant, agent.id, "restored", agent.bytes, resumed.get("node"))

    def _send(self, client: Fabric, agent: BackupAgent) -> dict[str, Any]:
        path = f"{client.agent(agent.id).path}/resume" + (f"?{self.query}" if self.query else "")
        headers = {SIGNING_KEY_HEADER: self.material.key.hex()}
        with self.folder.file_of(agent).open("rb") as file:
            resumed = upload(client, path, headers, file, quiet=True)
        return resumed if isinstance(resumed, dict) else {}

    @staticmethod
    def _failed_result(agent: BackupAgent, why: str) -> AgentResult:
        return AgentResult(agent.tenant, agent.id, "failed", why=why)
