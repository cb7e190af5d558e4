"""Agents of a fabric from Python: their memory, their settings, and where they live.

    from router.client.client import Fabric

    mira = Fabric("http://127.0.0.1:8000", key="...").agent("mira")
    mira.direct({"tool_call_id": "call_17", "replacement": "[cleared]", "mode": "amortize"})

Answers are those of docs/http-api.md, as dicts; errors are those of router/client/http_api.py.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from router.client.http_api import ClientError, HttpApi

Json = dict[str, Any]

MIGRATE_TIMEOUT_S: Final = 600.0  # a large agent over Wi-Fi
COPY_TIMEOUT_S: Final = 3_600.0  # likewise; a copy yields to turns


class Fabric(HttpApi):
    """A fabric at its URL, as the tenant of a key."""

    __slots__ = ()

    def nodes(self) -> list[Json]:
        """List the nodes that the key may see."""
        return self.rows("/v1/nodes")

    def router(self) -> Json:
        """Show the role of the router that the URL names."""
        return self.object("GET", "/v1/router")

    def promote(self) -> Json:
        """Make that router the active one."""
        return self.object("POST", "/v1/router/promote")

    def agents(self) -> list[Json]:
        """List the tenant's agents."""
        return self.rows("/v1/agents")

    def agent(self, name: str) -> "FabricAgent":
        """Return a client for one agent; the agent need not exist yet."""
        return FabricAgent(self, name)

    def drain(self, node: str) -> Json:
        """Begin to move all agents off a node, which takes no new ones."""
        return self._call_node(node, "drain")

    def undrain(self, node: str) -> Json:
        """Let a node take agents again."""
        return self._call_node(node, "undrain")

    def rows(self, path: str) -> list[Json]:
        """Return the rows of an API list."""
        answer = self.get(path)
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            message = f"{self.url} did not answer with a list; is it a fabric?"
            raise ClientError(message)
        return [row for row in rows if isinstance(row, dict)]

    def _call_node(self, node: str, verb: str) -> Json:
        return self.object("POST", f"/v1/nodes/{quote(node, safe='')}/{verb}")

    def object(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Json:
        """Return the JSON object that a request is answered with."""
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

    def show(self) -> Json:
        """Return its node, its size and its settings."""
        return self._call("GET", "")

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
        return self._call("POST", "/directives", body | _named(operation))

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
        return self._call("POST", "/supersede", body | _named(operation))

    def rebuild(self) -> Json:
        """Have its next turn recompute what was kept after edits."""
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
        body = {"as": name, **_node(to), **_named(operation)}
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


def _named(operation: str | None) -> Json:
    return {} if operation is None else {"operation": operation}


def _node(to: str | None) -> Json:
    return {} if to is None else {"to": to}


def _message(name: str | int) -> Json:
    return {"message": name} if isinstance(name, int) else {"tool_call_id": name}
