"""Stored responses, which clients may fetch, delete or continue, in the router's RAM.

Conversations are stored in clear text. When room runs out, the oldest response of the tenant with
the most bytes is dropped. Erasing an agent drops its responses. A restart
drops all, unless a standby router has copies.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import pack, unpack
from fabric.errors import NotFoundError
from fabric.ids import AgentId, AgentKey, TenantId
from fabric.turn.messages import Message
from router.http.auth import tenant_of
from router.http.refusals import unsupported
from router.large_work import weigh
from router.limits import RESPONSES_BYTES_MAX, RESPONSES_STORED_MAX

# Waits until a standby router has what was stored or deleted before.
Settle = Callable[[], Awaitable[None]]


async def settle_at_once() -> None:
    """Wait for nothing: this router has no standby."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """Stored response with its whole conversation."""

    body: dict[str, Any] = field(repr=False)  # as sent to the client
    given: list[Any] = field(repr=False)  # the items of its request
    messages: tuple[Message, ...] = field(repr=False)  # ends with the answer
    items: dict[str, Message] = field(repr=False)  # of the answer, by their ids
    agent: AgentId
    epoch: int
    is_continued: bool = False  # the agent has continued it
    size_bytes: int = 0

    @property
    def name(self) -> str:
        return str(self.body["id"])


@dataclass(frozen=True, slots=True)
class ResponseCopy:
    """Stored response on its way to a standby router."""

    tenant: str
    body: dict[str, Any]
    given: list[Any]
    messages: tuple[Message, ...]
    items: dict[str, Message]
    agent: AgentId
    epoch: int
    continued: bool


class ResponseStore:
    """Stored responses by tenant."""

    def __init__(
        self,
        erased_epoch: Callable[[AgentKey], int],
        on_put: Callable[[str], None] = lambda _: None,
        on_delete: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Use `erased_epoch` for the epoch up to which an agent was erased.

        `on_put` and `on_delete` are called with the name of each response that changes.
        """
        self._erased_epoch = erased_epoch
        self._on_put = on_put
        self._on_delete = on_delete
        self._by_tenant: dict[TenantId, dict[str, StoredResponse]] = {}
        self._items: dict[tuple[TenantId, str], Message] = {}
        self._sizes: dict[TenantId, int] = {}
        self._count = 0

    def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        """Store a response; drop old ones to make room."""
        if stored.epoch <= self._erased_epoch((tenant, stored.agent)):
            return
        parts = [stored.body, stored.given, stored.messages]
        stored.size_bytes = weigh(parts, RESPONSES_BYTES_MAX)
        self._by_tenant.setdefault(tenant, {})[stored.name] = stored
        self._items |= {(tenant, name): message for name, message in stored.items.items()}
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size_bytes
        self._count += 1
        self._on_put(f"{tenant}/{stored.name}")
        while self._count > RESPONSES_STORED_MAX or sum(self._sizes.values()) > RESPONSES_BYTES_MAX:
            largest = max(self._sizes, key=lambda tenant: self._sizes[tenant])
            self.delete(largest, next(iter(self._by_tenant[largest])))

    def get(self, tenant: TenantId, name: str) -> StoredResponse | None:
        """Return a response of the tenant, or None."""
        return self._by_tenant.get(tenant, {}).get(name)

    def item(self, tenant: TenantId, name: str) -> Message | None:
        """Return the message of an answer's item, or None."""
        return self._items.get((tenant, name))

    def delete(self, tenant: TenantId, name: str) -> bool:
        """Delete a response; return whether it was stored."""
        stored = self._by_tenant.get(tenant, {}).pop(name, None)
        if stored is None:
            return False
        for item in stored.items:
            self._items.pop((tenant, item), None)
        self._count -= 1
        self._sizes[tenant] -= stored.size_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._sizes[tenant]
        self._on_delete(f"{tenant}/{name}")
        return True

    def note_continued(self, tenant: TenantId, stored: StoredResponse) -> None:
        """Note that the agent has continued a response: another continuation needs a new agent."""
        if not stored.is_continued:
            stored.is_continued = True
            self._on_put(f"{tenant}/{stored.name}")

    # --- copies, which a standby router keeps -------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all responses, each after its tenant's."""
        return [f"{tenant}/{name}" for tenant, own in self._by_tenant.items() for name in own]

    def encoded(self, name: str) -> bytes | None:
        """Return a response in bytes; None if it is not stored."""
        tenant, _, response = name.partition("/")
        stored = self.get(TenantId(tenant), response)
        if stored is None:
            return None
        parts = (stored.body, stored.given, stored.messages, stored.items)
        return pack(ResponseCopy(tenant, *parts, stored.agent, stored.epoch, stored.is_continued))

    def take(self, raw: bytes) -> None:
        """Store a copy of another router's response; raise RejectedError for other bytes."""
        copy = unpack(ResponseCopy, raw)
        stored = StoredResponse(
            copy.body, copy.given, copy.messages, copy.items, copy.agent, copy.epoch, copy.continued
        )
        self.delete(TenantId(copy.tenant), stored.name)
        self.put(TenantId(copy.tenant), stored)

    def drop(self, name: str) -> None:
        """Remove a response by its name after its tenant's."""
        tenant, _, response = name.partition("/")
        self.delete(TenantId(tenant), response)

    def forget(self, key: AgentKey) -> None:
        """Delete all responses of an agent."""
        tenant, agent = key
        responses = self._by_tenant.get(tenant, {})
        for name in [name for name, stored in responses.items() if stored.agent == agent]:
            self.delete(tenant, name)


class StoredApi:
    """Stored responses and their inputs, as long as they are kept."""

    def __init__(self, store: ResponseStore, settle: Settle = settle_at_once) -> None:
        self._store = store
        self._settle = settle

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{response}", self.show, methods=["GET"]),
            Route("/v1/responses/{response}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response}/input_items", self.given, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            unsupported("stream", "a stored response is complete: fetch it whole")
        return JSONResponse(self._find_stored(request).body)

    async def delete(self, request: Request) -> Response:
        name = self._find_stored(request).name
        self._store.delete(tenant_of(request), name)
        await self._settle()
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def given(self, request: Request) -> Response:
        stored = self._find_stored(request)
        items = [
            {"id": f"{stored.name}_{index}", "type": "message", **item}
            for index, item in enumerate(stored.given)
        ]
        ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        page = {"data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}
        return JSONResponse({"object": "list", **page})

    def _find_stored(self, request: Request) -> StoredResponse:
        name = request.path_params["response"]
        stored = self._store.get(tenant_of(request), name)
        if stored is None:
            message = f"Response with id '{name[:100]}' not found: not stored, or dropped since."
            raise NotFoundError(message, code="response_not_found")
        return stored
