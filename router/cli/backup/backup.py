"""`macfabric backup`: save a fabric's keys and agents in a folder; again to save what changed."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fabric.control.hibernation_calls import SIGNING_KEY_HEADER
from fabric.keys import CLUSTER_KEY
from fabric.record.hibernation_file import caller_signing_key
from router.cli.backup.backup_folder import (
    BackupAgent,
    BackupFolder,
    BackupList,
    checksum,
    fabric_id,
    file_name,
)
from router.cli.backup.key_material import (
    KeyMaterial,
    find_keys,
    new_key,
    read_keys,
    read_material,
    write_material,
)
from router.cli.backup.progress import AgentResult, Results
from router.cli.backup.tenants import (
    TenantClients,
    missing_client_reason,
    reason_of,
    retry_refused,
    tenant_clients,
)
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.file_exchange import download
from router.client.http_api import ClientError, UnreachableError
from router.limits import BACKUP_AGENTS_MAX, BACKUP_SAVE_S


def add_backup(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "backup",
        description="Save the cluster's key, the authority of certificates and every agent in "
        "FOLDER, while the fabric serves. Repeat it to continue an interrupted backup, or to save "
        "what changed since: agents that did not change are kept, and so are those that the fabric "
        "no longer has. Files of agents hold conversations in clear text. Exit status 1 if an "
        "agent could not be saved.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new, empty, or a backup")
    parser.add_argument(
        "--agents", metavar="PATTERN", help="save only agents whose id matches, such as 'team-*'"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help="where cluster.key is (default: the data folder, then where `certs create` put it)",
    )
    add_backup_options(parser)
    parser.set_defaults(run=run_backup)


def add_backup_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that backup and restore share."""
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="PATH",
        help="file whose key or passphrase encrypts the keys in FOLDER; keep it elsewhere",
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="file of `TENANT: KEY`, for the agents of several tenants (default: keys in the "
        "settings of the fabric in the data folder)",
    )
    add_fabric_options(parser)


def run_backup(arguments: argparse.Namespace) -> int:
    """Save the keys, then the agents; print the results."""
    data = DataFolder((arguments.data or default_data_dir()).expanduser())
    keys = find_keys(data.path, arguments.keys)
    files = read_keys(keys) if keys else {}
    folder = BackupFolder(arguments.folder.expanduser())
    clients = tenant_clients(fabric_of(arguments), data, arguments.api_keys)
    contents = folder.prepare(fabric_id(files.get(CLUSTER_KEY)))
    material = _keep_material(folder, files, arguments.key_file)
    rows, why_incomplete = clients.list_agents()
    pattern = arguments.agents
    chosen = [row for row in rows if pattern is None or fnmatchcase(str(row.get("id")), pattern)]
    if len(chosen) > BACKUP_AGENTS_MAX:
        message = f"{len(chosen)} agents exceed {BACKUP_AGENTS_MAX}: choose fewer with --agents"
        raise CommandError(message, MISUSED)
    saving = _Saving(folder, contents, material, clients)
    with (
        Results("backing up", len(chosen), as_json=arguments.json) as results,
        saving.writing_list(),
    ):
        for row in chosen:
            results.add(saving.save(row))
    contents = saving.close(len([r for r in results.rows if r.result == "failed"]))
    missing = _count_missing(contents, rows, clients)
    summary = {
        "folder": str(folder.path),
        "fabric": contents.fabric,
        "keys": sorted(material.files),
        "keys_encrypted": arguments.key_file is not None,
        "missing": why_incomplete,
        "kept_of_before": missing,
        "agents_in_backup": contents.agents_count,
    }
    lines = [_about_keys(folder, material, arguments.key_file)]
    lines += (
        [f"{missing} agents of earlier backups, which the fabric no longer has"] if missing else []
    )
    lines += [f"incomplete: {why_incomplete}"] if why_incomplete else []
    lines += [
        f"{folder.path} has {contents.agents_count} agents: restore them with `macfabric restore`"
    ]
    return results.report(summary, lines, is_whole=why_incomplete is None)


def _keep_material(
    folder: BackupFolder, files: dict[str, str], key_file: Path | None
) -> KeyMaterial:
    """Write the key material, with the signing key of the backup if there is one."""
    if folder.keys.exists():
        before = read_material(folder.keys, key_file)
    else:
        before = KeyMaterial(new_key())
    material = replace(before, files=before.files | files)
    write_material(folder.keys, material, key_file)
    return material


def _count_missing(contents: BackupList, rows: list[dict[str, Any]], clients: TenantClients) -> int:
    """Count the agents of the backup that the fabric no longer has."""
    present = {(str(row.get("tenant") or ""), str(row.get("id"))) for row in rows}
    visible = [a for a in contents.agents if clients.is_operator or a.tenant == clients.own_tenant]
    return sum(agent.key not in present for agent in visible)


def _about_keys(folder: BackupFolder, material: KeyMaterial, key_file: Path | None) -> str:
    if not material.files:
        return (
            "the fabric's own keys are not on this machine, so the backup lacks them; its agents "
            "can be restored without them"
        )
    named = ", ".join(material.files)
    if key_file is None:
        return f"keys: {named}, in {folder.keys}, readable by you alone and not encrypted"
    return f"keys: {named}, encrypted: without {key_file} nothing here can be restored"


@dataclass(slots=True)
class _Saving:
    """Saver of agents, which keeps the list on disk current."""

    folder: BackupFolder
    contents: BackupList
    material: KeyMaterial
    clients: TenantClients
    _agents: dict[tuple[str, str], BackupAgent] = field(default_factory=dict)
    _noted_s: float = 0.0
    _why_unreachable: str | None = None

    def __post_init__(self) -> None:
        self._agents = {agent.key: agent for agent in self.contents.agents}
        self.contents = replace(self.contents, began_at=_now(), ended_at=None, failed_count=0)

    @contextmanager
    def writing_list(self) -> Iterator[None]:
        """Write the list at the beginning, and again when the block is interrupted."""
        self._note()
        try:
            yield
        finally:
            self._note()

    def save(self, row: dict[str, Any]) -> AgentResult:
        """Save an agent unless its last turn is in the backup already."""
        tenant, name = row.get("tenant"), str(row.get("id"))
        tenant = None if tenant is None else str(tenant)
        backed_up = self._agents.get((tenant or "", name))
        if backed_up is not None and self._is_current(backed_up, row):
            return AgentResult(tenant, name, "kept", backed_up.bytes)
        client = self.clients.client(tenant)
        if client is None:
            return AgentResult(tenant, name, "failed", why=missing_client_reason(tenant))
        if self._why_unreachable is not None:
            return AgentResult(tenant, name, "failed", why=f"skipped: {self._why_unreachable}")
        target = self.folder.path / "agents" / file_name(tenant, name)
        key = self.material.key
        try:
            header, _ = retry_refused(
                lambda: download(
                    client,
                    f"{client.agent(name).path}/hibernate",
                    {SIGNING_KEY_HEADER: key.hex()},
                    target,
                    key_of=lambda _: caller_signing_key(key),
                    quiet=True,
                )
            )
        except UnreachableError as error:
            self._why_unreachable = reason_of(error)
            return AgentResult(tenant, name, "failed", why=self._why_unreachable)
        except (ClientError, CommandError) as error:
            return AgentResult(tenant, name, "failed", why=reason_of(error))
        saved = BackupAgent(
            tenant=tenant,
            id=name,
            file=target.name,
            bytes=target.stat().st_size,
            sha256=checksum(target),
            tokens=header.tokens_count,
            epoch=header.epoch,
            revision=header.revision,
            model=header.model,
            fingerprint=header.fingerprint.hex(),
            saved_at=_now(),
        )
        self._agents[saved.key] = saved
        if time.monotonic() - self._noted_s > BACKUP_SAVE_S:
            self._note()
        return AgentResult(tenant, name, "saved", saved.bytes, str(row.get("owner") or "") or None)

    def close(self, failed_count: int) -> BackupList:
        """Write the finished list."""
        self.contents = replace(self.contents, ended_at=_now(), failed_count=failed_count)
        self._note()
        return self.contents

    def _is_current(self, saved: BackupAgent, row: dict[str, Any]) -> bool:
        """Return whether the backup has an agent as of its last turn, with a whole file."""
        if (saved.epoch, saved.revision) != (row.get("epoch"), row.get("revision")):
            return False
        path = self.folder.file_of(saved)
        return path.is_file() and path.stat().st_size == saved.bytes

    def _note(self) -> None:
        self.contents = self.contents.with_agents(self._agents)
        self.folder.write(self.contents)
        self._noted_s = time.monotonic()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
