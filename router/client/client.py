"""Agents of a fabric from Python: their memory, their settings, and where they live.

    from router.client.client import Fabric

    mira = Fabric("http://127.0.0.1:8000", key="...").agent("mira")
    mira.direct({"tool_call_id": "call_17", "replacement": "[cleared]", "mode": "amortize"})

Answers are those of docs/http-api.md, as dicts; errors are those of router/client/http_api.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from router.client.http_api import ClientError, HttpApi
from router.limits import AGENTS_PAGE_MAX

Json = dict[str, Any]

MIGRATE_TIMEOUT_S: Final = 600.0  # a large agent over Wi-Fi
SAVE_TIMEOUT_S: Final = 120.0  # of a node's agents, before it restarts
COPY_TIMEOUT_S: Final = 3_600.0  # a large agent over Wi-Fi; a copy yields to turns


class Fabric(HttpApi):
    """A fabric at its URL, as the tenant of a key."""

    __slots__ = ()

    def nodes(self, **filters: str) -> list[Json]:
        """List the nodes that the key may see, or some of them (`state`)."""
        return self.all_rows("/v1/nodes", filters)

    def router(self) -> Json:
        """Show the role of the router that the URL names."""
        return self.object("GET", "/v1/router")

    def promote(self) -> Json:
        """Make that router the active one."""
        return self.object("POST", "/v1/router/promote")

    def restart_router(self, wait_s: float) -> Json:
        """Restart that router's process; its streams get `wait_s` to end."""
        return self.object("POST", "/v1/router/restart", {"wait_s": wait_s})

    def agents(self, limit: int | None = None, **filters: str) -> list[Json]:
        """List the tenant's agents, or some of them (`node`, `tier`, for operators `tenant`)."""
        return self.all_rows("/v1/agents", filters, limit)

    def usage(self, **filters: str) -> Json:
        """Return the usage of tenants (`period`, `limit`, for operators `tenant`), and limits."""
        query = urlencode(filters)
        return self.object("GET", f"/v1/usage?{query}" if query else "/v1/usage")

    def agent(self, name: str) -> "FabricAgent":
        """Return a client for one agent; the agent need not exist yet."""
        return FabricAgent(self, name)

    def drain(self, node: str) -> Json:
        """Begin to move all agents off a node, which takes no new ones."""
        return self._call_node(node, "drain")

    def undrain(self, node: str) -> Json:
        """Let a node take agents again."""
        return self._call_node(node, "undrain")

    def restart_node(self, node: str, wait_s: float) -> Json:
        """Restart a node's process once it has saved its agents; turns get `wait_s` to end."""
        path = f"/v1/nodes/{quote(node, safe='')}/restart"
        return self.object("POST", path, {"wait_s": wait_s}, wait_s + SAVE_TIMEOUT_S)

    def rows(self, path: str) -> list[Json]:
        """Return the rows of an API list."""
        return self._rows_of(self.get(path))

    def _rows_of(self, answer: Any) -> list[Json]:
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            message = f"{self.url} did not answer with a list; is it a fabric?"
            raise ClientError(message)
        return [row for row in rows if isinstance(row, dict)]

    def all_rows(
        self, path: str, filters: Mapping[str, str], limit: int | None = None
    ) -> list[Json]:
        """Return the rows of all pages of an API list, or the first `limit` of them."""
        rows: list[Json] = []
        after: Json = {}
        while limit is None or len(rows) < limit:
            count = {} if limit is None else {"limit": str(min(limit - len(rows), AGENTS_PAGE_MAX))}
            query = urlencode({**filters, **count, **after})
            answer = self.get(f"{path}?{query}" if query else path)
            rows += self._rows_of(answer)
            if not answer.get("has_more"):
                break
            after = {"after": str(answer.get("last_id"))}
        return rows

    def _call_node(self, node: str, verb: str) -> Json:
        return self.object("POST", f"/v1/nodes/{quote(node, safe='')}/{verb}")

    def object(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Json:
        """Return the JSON object of a response."""
        answer = self.call(method, path, body, timeout_s)
        if not isinstance(answer, dict):
            message = f"{self.url} did not answer with a JSON object; is it a fabric?"
            raise ClientError(message)
        return answer


@dataclass(frozen=True, slots=True)
class FabricAgent:
    """One agent of a tenant, by its name."""

    fabric: Fabric
    name: str

    @property
    def path(self) -> str:
        """Path of the agent below the fabric's URL."""
        return f"/v1/agents/{quote(self.name, safe='')}"

    def show(self, tenant: str | None = None) -> Json:
        """Return its node, its size and its settings; `tenant` is for operators."""
        return self._call("GET", "" if tenant is None else f"?{urlencode({'tenant': tenant})}")

    def turns(self, tenant: str | None = None, limit: int | None = None) -> list[Json]:
        """List its last turns, the newest first; `tenant` is for operators."""
        parameters = {"tenant": tenant, "limit": limit}
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        return self.fabric.rows(f"{self.path}/turns?{query}" if query else f"{self.path}/turns")

    def generate(self, text: str | None = None, *messages: Json, **options: Any) -> Json:
        """Append a text, or messages, to its context and return its answer."""
        prompt: Json = {"messages": list(messages)} if text is None else {"text": text}
        return self._call("POST", "/generate", {**prompt, **options})

    # --- context -----------------------------------------------------------------------------

    def memory(self) -> Json:
        """List its messages by number, its directives, and those undone."""
        return self._call("GET", "/directives")

    def direct(self, *directives: Json, operation: str | None = None) -> Json:
        """Edit its context by all of these directives, or by none if one is invalid."""
        body: Json = {"directives": list(directives)}
        return self._call("POST", "/directives", body | _operation_field(operation))

    def undo(self, operation: str | None = None) -> Json:
        """Undo the directives of one operation, or all of them."""
        path = "/directives" if operation is None else f"/directives/{quote(operation, safe='')}"
        return self._call("DELETE", path)

    def supersede(
        self,
        earlier: str | int,
        later: str | int,
        mode: str = "exact",
        operation: str | None = None,
    ) -> Json:
        """Replace an earlier result or message (a call's id, or a number) by a later one."""
        body: Json = {"earlier": _message(earlier), "later": _message(later), "mode": mode}
        return self._call("POST", "/supersede", body | _operation_field(operation))

    def rebuild(self) -> Json:
        """Make its next turn recompute the tokens that were kept after edits."""
        return self._call("POST", "/rebuild", {})

    # --- retention ---------------------------------------------------------------------------

    def pin(self, *, pinned: bool = True) -> Json:
        """Evict it last, or like any other."""
        return self._call("POST", "/pin", {"pinned": pinned})

    def decay(self, after_s: float | None = 0.0) -> Json:
        """Evict it before others once it has been idle for `after_s`; None reverts that."""
        if after_s is None:
            return self._call("DELETE", "/decay")
        return self._call("POST", "/decay", {"after_s": after_s})

    def close(self) -> Json:
        """Drop its resident cache and its pin, and evict it first, until its next turn."""
        return self._call("POST", "/close", {})

    def evict(self, copy_on: str | None = None) -> Json:
        """Drop its resident cache, or the copy on a node's disk."""
        return self._call("POST", "/evict", {"from": "disk", "node": copy_on} if copy_on else {})

    def share(self, scope: str = "tenant") -> Json:
        """Let other agents of its tenant reuse its memory, or (`agent`) none."""
        return self._call("POST", "/share", {"scope": scope})

    def erase(self, *, runs: bool = False) -> Json:
        """Remove every byte of it, everywhere, also from runs that quote it; return a receipt."""
        return self._call("DELETE", "?runs=true" if runs else "")

    # --- placement ---------------------------------------------------------------------------

    def migrate(self, to: str) -> Json:
        """Move it to another node; return once the move is committed."""
        return self._call("POST", "/migrate", {"to": to}, MIGRATE_TIMEOUT_S)

    def fork(self, name: str, to: str | None = None, operation: str | None = None) -> Json:
        """Make a new agent with its context."""
        body = {"as": name, **_node(to), **_operation_field(operation)}
        return self._call("POST", "/fork", body, COPY_TIMEOUT_S)

    def replicate(self, to: str, *, keep: bool = True) -> Json:
        """Copy it to another node, and refresh the copy after each turn if `keep`."""
        return self._call("POST", "/replicate", {"to": to, "keep": keep}, COPY_TIMEOUT_S)

    def prefetch(self, to: str | None = None) -> Json:
        """Load it into RAM ahead of its turn, or copy it to a node's disk."""
        return self._call("POST", "/prefetch", _node(to), COPY_TIMEOUT_S)

    def _call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Json:
        return self.fabric.object(method, self.path + path, body, timeout_s)


def _operation_field(operation: str | None) -> Json:
    return {} if operation is None else {"operation": operation}


def _node(to: str | None) -> Json:
    return {} if to is None else {"to": to}


def _message(name: str | int) -> Json:
    return {"message": name} if isinstance(name, int) else {"tool_call_id": name}
