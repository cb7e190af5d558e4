"""Agents of a fabric from Python: their memory, what is said of it, and where they live.

    from router.client.client import Fabric

    mira = Fabric("http://127.0.0.1:8000", key="...").agent("mira")
    mira.direct({"tool_call_id": "call_17", "replacement": "[cleared]", "mode": "amortize"})

Answers are those of docs/http-api.md, as dicts.
"""

import http.client
import json
import ssl
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

TIMEOUT_S = 120.0
Json = dict[str, Any]


class RefusedError(Exception):
    """An error that the fabric answered; `param` names the field at fault."""

    def __init__(self, status: int, error: Json) -> None:
        super().__init__(error.get("message") or f"the fabric answered {status}")
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")


@dataclass(frozen=True, slots=True)
class Fabric:
    """A fabric at its URL, as the tenant of a key."""

    url: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    context: ssl.SSLContext | None = None  # for the fabric's own authority: docs/security.md

    def agents(self) -> list[Json]:
        """List the tenant's agents."""
        return list(self.call("GET", "/v1/agents")["data"])

    def agent(self, name: str) -> "FabricAgent":
        """Return one of them; it need not be there."""
        return FabricAgent(self, name)

    def call(self, method: str, path: str, body: object = None) -> Json:
        """Return a request's JSON; raise RefusedError, or OSError where nobody answers."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=self.context)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=self.timeout_s)
        )
        headers = {"content-type": "application/json"} if body is not None else {}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, parts.path.rstrip("/") + path, payload, headers)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            answer: Json = json.loads(raw)
        except ValueError:
            answer = {}
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise RefusedError(response.status, answer.get("error") or {})
        return answer


@dataclass(frozen=True, slots=True)
class FabricAgent:
    """One agent of a tenant, by its name."""

    fabric: Fabric
    name: str

    def show(self) -> Json:
        """Return where it lives, how large it is, and what was said of it."""
        return self._call("GET", "")

    def generate(self, text: str | None = None, *messages: Json, **more: Any) -> Json:
        """Put a text, or messages, behind what it remembers, and return its answer."""
        said: Json = {"messages": list(messages)} if text is None else {"text": text}
        return self._call("POST", "/generate", {**said, **more})

    # --- its memory --------------------------------------------------------------------------

    def memory(self) -> Json:
        """List its messages by number, its directives, and those undone."""
        return self._call("GET", "/directives")

    def direct(self, *directives: Json, operation: str | None = None) -> Json:
        """Let parts of its memory read otherwise, all or none of them."""
        body: Json = {"directives": list(directives)}
        return self._call("POST", "/directives", body | _named(operation))

    def undo(self, operation: str | None = None) -> Json:
        """Take back what one operation said, or everything."""
        path = "/directives" if operation is None else f"/directives/{quote(operation, safe='')}"
        return self._call("DELETE", path)

    def supersede(
        self,
        earlier: str | int,
        later: str | int,
        mode: str = "exact",
        operation: str | None = None,
    ) -> Json:
        """Let a later result or message, by its call's id or its number, replace an earlier one."""
        body: Json = {"earlier": _message(earlier), "later": _message(later), "mode": mode}
        return self._call("POST", "/supersede", body | _named(operation))

    def rebuild(self) -> Json:
        """Have its next turn compute anew what was kept behind edits."""
        return self._call("POST", "/rebuild", {})

    # --- what it is worth --------------------------------------------------------------------

    def pin(self, *, pinned: bool = True) -> Json:
        """Evict it last, or like any other."""
        return self._call("POST", "/pin", {"pinned": pinned})

    def decay(self, after_s: float | None = 0.0) -> Json:
        """Evict it before others once it was idle for so long; None takes that back."""
        if after_s is None:
            return self._call("DELETE", "/decay")
        return self._call("POST", "/decay", {"after_s": after_s})

    def close(self) -> Json:
        """Let go of its hot memory and its pin, and evict it first, until its next turn."""
        return self._call("POST", "/close", {})

    def evict(self, copy_on: str | None = None) -> Json:
        """Let go of its hot memory, or of the copy on a node's disk."""
        return self._call("POST", "/evict", {"from": "disk", "node": copy_on} if copy_on else {})

    def share(self, scope: str = "tenant") -> Json:
        """Let other agents of its tenant begin with its memory, or (`agent`) nobody."""
        return self._call("POST", "/share", {"scope": scope})

    # --- where it is -------------------------------------------------------------------------

    def migrate(self, to: str) -> Json:
        """Move it to another node; returns once it is committed."""
        return self._call("POST", "/migrate", {"to": to})

    def fork(self, name: str, to: str | None = None, operation: str | None = None) -> "FabricAgent":
        """Make a new agent with its memory."""
        place = {} if to is None else {"to": to}
        self._call("POST", "/fork", {"as": name, **place, **_named(operation)})
        return self.fabric.agent(name)

    def erase(self) -> Json:
        """Remove every byte of it, everywhere; returns a receipt."""
        return self._call("DELETE", "")

    def _call(self, method: str, path: str, body: object = None) -> Json:
        return self.fabric.call(method, f"/v1/agents/{quote(self.name, safe='')}{path}", body)


def _named(operation: str | None) -> Json:
    return {} if operation is None else {"operation": operation}


def _message(name: str | int) -> Json:
    return {"message": name} if isinstance(name, int) else {"tool_call_id": name}
