"""A fabric as each of its tenants sees it: files of agents take the key of their tenant."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from fabric.errors import FabricError
from fabric.keys import is_plain
from router.cli.config_file import keys_of_file, read_settings
from router.cli.data_folder import DataFolder, read_json
from router.cli.errors import CommandError, describe_os_error
from router.client.client import Fabric
from router.client.http_api import ClientError, RefusedError
from router.limits import BACKUP_RETRY_S_MAX, BACKUP_TRIES_MAX

T = TypeVar("T")
_TEMPORARY: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_UNSETTLED: Final = frozenset({"migration_in_progress", "agent_changed", "nothing_saved"})


@dataclass(frozen=True, slots=True)
class TenantClients:
    """Clients of one fabric, one for each tenant whose key is known."""

    fabric: Fabric
    own_tenant: str | None  # of the fabric's own key, or of programs on this machine
    is_operator: bool
    keys: Mapping[str, str]  # by tenant

    def client(self, tenant: str | None) -> Fabric | None:
        """Return the client of a tenant (None: of the own key); None if its key is unknown."""
        if tenant is None or tenant == self.own_tenant:
            return self.fabric if self.own_tenant is not None else None
        key = self.keys.get(tenant)
        return None if key is None else replace(self.fabric, key=key)

    def list_agents(self) -> tuple[list[dict[str, Any]], str | None]:
        """List the agents that may be saved, each with its tenant; and why the list lacks some."""
        if self.is_operator:
            rows = self.fabric.agents(tenant="*")
        else:
            rows = [row | {"tenant": self.own_tenant} for row in self.fabric.agents()]
        all_tenants = "&tenant=*" if self.is_operator else ""
        reach = self.fabric.get(f"/v1/agents?limit=1{all_tenants}")
        if reach.get("complete", True):
            return rows, None
        unheard = ", ".join(map(str, reach.get("unheard") or [])) or f"{reach.get('unmet')} nodes"
        return rows, f"nodes that have not reported their agents yet: {unheard}"


def tenant_clients(fabric: Fabric, folder: DataFolder, key_file: Path | None) -> TenantClients:
    """Return the clients of a fabric; keys are read from `key_file`, or the data folder's own."""
    with fabric.stream("GET", "/v1/events") as events:
        caller = next((event.data.get("caller") or {} for event in events), {})
    tenant = caller.get("tenant")
    keys = keys_of_file(key_file) if key_file is not None else _local_keys(fabric, folder)
    plain = {name: key for name, key in keys.items() if is_plain(key)}
    return TenantClients(fabric, tenant, bool(caller.get("operator")), plain)


def _local_keys(fabric: Fabric, folder: DataFolder) -> Mapping[str, str]:
    """Return the keys in the settings of the fabric that runs in the data folder."""
    if read_json(folder.endpoint).get("url") != fabric.url:
        return {}
    with suppress(CommandError, FabricError, OSError):
        return read_settings(folder.config).router.api_keys
    return {}


def missing_client_reason(tenant: str | None) -> str:
    """Explain why there is no client for an agent's tenant, and what to do."""
    if tenant is None:
        return "an operator's key cannot read agents: set MACFABRIC_API_KEY to the tenant's key"
    return f"no key of its tenant {tenant!r} is known: name a file of `TENANT: KEY` with --api-keys"


def retry_refused(action: Callable[[], T], rest: Callable[[float], None] = time.sleep) -> T:
    """Repeat an action a few times while the fabric refuses it temporarily."""
    for _ in range(BACKUP_TRIES_MAX - 1):
        try:
            return action()
        except RefusedError as error:
            if error.status not in _TEMPORARY and error.code not in _UNSETTLED:
                raise
            rest(min(error.retry_after_s or 1.0, BACKUP_RETRY_S_MAX))
    return action()


def reason_of(error: ClientError | CommandError | OSError) -> str:
    """Return an error's text without the fabric's address."""
    if isinstance(error, OSError):
        return describe_os_error(error)
    fields = error.answer.get("error") if isinstance(error, RefusedError) else None
    message = fields.get("message") if isinstance(fields, dict) else None
    return str(message or error)
