"""Hibernation of agents by the router's own calls to real nodes."""

from collections.abc import Iterator
from typing import Any

import httpx2

from fabric.control.hibernation_calls import (
    CALL_HEADER,
    HIBERNATE_PATH,
    RESUME_PATH,
    Hibernate,
    Resume,
    encode_header,
)
from fabric.ids import AgentId, TenantId
from fabric.keys import http_secret
from fabric.record.hibernation_file import HEAD_BYTES, MAGIC, TAG_BYTES
from fabric.turn.generation import CLUSTER_HEADER
from node.service import NodeService
from tests.support.services import TENANT

BROUGHT_KEY = b"b" * 32


def headers_of(service: NodeService, call: Hibernate | Resume) -> dict[str, str]:
    """Return the headers that accompany a file."""
    secret = http_secret(service.node.resources.identity.config.cluster_key)
    return {CLUSTER_HEADER: secret, CALL_HEADER: encode_header(call)}


def post(service: NodeService, path: str, call: Hibernate | Resume, body: Any) -> httpx2.Response:
    """Send a request to a node over HTTP."""
    url = service.node.resources.endpoint.url + path
    return httpx2.post(url, content=body, headers=headers_of(service, call), timeout=60)


def hibernate(
    service: NodeService,
    agent: str,
    *,
    epoch: int = 1,
    key: bytes | None = None,
    tenant: TenantId = TENANT,
) -> bytes:
    """Return an agent's file."""
    call = Hibernate(tenant, AgentId(agent), epoch, key, b"salt" if key else b"")
    response = post(service, HIBERNATE_PATH, call, b"")
    assert response.status_code == 200, response.text
    return response.content


def resume(
    service: NodeService,
    raw: bytes,
    agent: str = "back",
    *,
    epoch: int = 2,
    replace: bool = False,
    key: bytes | None = None,
    tenant: TenantId = TENANT,
) -> dict[str, Any]:
    """Send a file to a node; return its answer, or the refusal's code as `refused`."""
    call = Resume(tenant, AgentId(agent), epoch, replace, key)
    response = post(service, RESUME_PATH, call, raw)
    answer = response.json()
    if response.status_code == 200:
        return dict(answer)
    return {
        "refused": answer["error"]["code"],
        "status": response.status_code,
        "message": answer["error"]["message"],
    }


def frame_ends(raw: bytes) -> Iterator[int]:
    """List where each frame of a file ends."""
    at = len(MAGIC)
    while at < len(raw):
        at += HEAD_BYTES + int.from_bytes(raw[at + 4 : at + 8], "little") + TAG_BYTES
        yield at


def trace_of(service: NodeService) -> tuple[Any, ...]:
    """Return all state that a refused file must not change."""
    blocks = service.node.resources.store.blocks
    agents = {(a.key, a.manifest.epoch, a.manifest.revision) for a in service.node.resources.table}
    return agents, blocks.total_bytes, tuple(blocks.check_integrity())
