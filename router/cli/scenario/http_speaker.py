"""A fabric as a run's speaker: its public HTTP API, one thread for each request."""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from router.cli.endpoint import Endpoint, agent_path
from router.cli.errors import CommandError
from router.limits import SCENARIO_LINE_BYTES_MAX
from router.scenario.speaker import (
    FINAL,
    LATER,
    WAIT_S,
    AgentCopy,
    AskAgainError,
    Question,
    SpokenAnswer,
    TurnFigures,
    WantedCall,
    chat_body,
    edits_of_runs,
    later_error,
    read_arguments,
)

CHAT = "/v1/chat/completions"
SILENT_S = 120.0  # streams say every few seconds that they live
COPY_S = 600.0  # a large agent over Wi-Fi


class RunRefusedError(FabricError):
    """The fabric refused for good."""

    code = "refused"


@dataclass(frozen=True, slots=True)
class HttpSpeaker:
    """Asks as the tenant of the endpoint's key."""

    endpoint: Endpoint
    model: str

    async def ask(self, question: Question) -> SpokenAnswer:
        """Return an agent's answer."""
        return await asyncio.to_thread(self._ask, question)

    async def fork(
        self, source: AgentId, copy: AgentId, to: str | None, op: OperationId
    ) -> AgentCopy:
        """Make an agent that begins with the memory of another."""
        body = {"as": copy, "operation": op} | ({"to": to} if to is not None else {})
        made = await self._call("POST", agent_path(source, "fork"), body)
        return AgentCopy(str(made.get("node") or made.get("to")), int(made.get("bytes_sent") or 0))

    async def direct(
        self, agent: AgentId, items: Sequence[Mapping[str, Any]], op: OperationId
    ) -> None:
        """Edit an agent's memory from now on."""
        body = {"directives": list(items), "operation": op}
        path = agent_path(agent, "directives")
        if not await self._call("POST", path, body, gone=True):
            message = f"no node has {agent}"
            raise AskAgainError(message, WAIT_S)

    async def edits(self, agent: AgentId) -> frozenset[OperationId] | None:
        """Return the operations of runs whose edits an agent holds; None where no node has it."""
        shown = await self._call("GET", agent_path(agent, "directives"), None, gone=True)
        if not shown:
            return None
        return frozenset(edits_of_runs(str(each["operation"]) for each in shown["directives"]))

    async def take_back(self, agent: AgentId) -> bool:
        """Undo what runs have edited of an agent's memory; say whether there was anything."""
        path = agent_path(agent, "directives")
        held = await self.edits(agent) or ()
        for operation in held:
            await self._call("DELETE", f"{path}/{operation}", None, gone=True)
        return bool(held)

    async def move(self, agent: AgentId, to: str) -> AgentCopy:
        """Move an agent to a node."""
        moved = await self._call("POST", agent_path(agent, "migrate"), {"to": to})
        return AgentCopy(str(moved.get("to")), int(moved.get("bytes_sent") or 0))

    async def nodes(self) -> tuple[str, ...]:
        """Name the nodes that take agents."""
        listed = await self._call("GET", "/v1/nodes", None)
        return tuple(node["name"] for node in listed["data"] if node.get("state") == "ready")

    async def owners(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return the nodes where agents are now; those that are nowhere are left out."""
        shown = {
            each: await self._call("GET", agent_path(each), None, gone=True) for each in agents
        }
        return {each: str(row["owner"]) for each, row in shown.items() if row.get("owner")}

    async def prefetch(self, agent: AgentId) -> None:
        """Bring an agent's memory where its next turn finds it at once."""
        await self._call("POST", agent_path(agent, "prefetch"), {})

    async def erase(self, agent: AgentId) -> None:
        """Remove an agent and its memory; one that nobody knows is gone already."""
        await self._call("DELETE", agent_path(agent), None, gone=True)

    # --- requests ----------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: object, *, gone: bool = False) -> Any:
        return await asyncio.to_thread(self._called, method, path, body, gone=gone)

    def _called(self, method: str, path: str, body: object, *, gone: bool) -> Any:
        with _in_words(), self.endpoint.asking(method, path, COPY_S) as connection:
            response = self._send(connection, method, path, body)
            raw = response.read()
            if gone and response.status == HTTPStatus.NOT_FOUND:
                return {}
            _require_answered(response, raw)
            return self.endpoint.read(response.status, raw)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object,
        more: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:  # fmt: skip
        payload = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json"} if body is not None else {}
        headers = self.endpoint.headers({**headers, **(more or {})})
        connection.request(method, self.endpoint.path_of(path), payload, headers)
        return connection.getresponse()

    def _ask(self, question: Question) -> SpokenAnswer:
        body, agent = chat_body(question, self.model), {"x-agent-id": question.agent}
        began_s = time.monotonic()
        with _in_words(), self.endpoint.asking("POST", CHAT, SILENT_S) as connection:
            response = self._send(connection, "POST", CHAT, body, agent)
            if response.status != HTTPStatus.OK:
                raw = response.read()
                _require_answered(response, raw)
                self.endpoint.read(response.status, raw)
            parts = _Parts(began_s)
            for chunk in _chunks(response):
                parts.add(chunk)
            return parts.answer(dict(response.headers.items()))


@dataclass(slots=True)
class _Parts:
    """An answer as its chunks come."""

    began_s: float
    first_s: float | None = None
    texts: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # id, name, then parts of arguments
    usage: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            said = {delta.get("content"), delta.get("reasoning_content")} - {None, ""}
            if (said or delta.get("tool_calls")) and self.first_s is None:
                self.first_s = time.monotonic()
            self.texts.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                of = call.get("function") or {}
                begun = [call.get("id") or "", of.get("name") or ""]
                known = self.calls.setdefault(int(call["index"]), begun)
                known.append(of.get("arguments") or "")
            self.is_whole |= choice.get("finish_reason") is not None

    def answer(self, headers: Mapping[str, str]) -> SpokenAnswer:
        if not self.is_whole:
            message = "an answer broke off"
            raise AskAgainError(message, WAIT_S)
        ended_s = time.monotonic()
        cached = headers.get("x-macfabric-cached-tokens") or 0
        figures = TurnFigures(
            int(self.usage.get("prompt_tokens") or 0),
            int(cached),
            int(self.usage.get("completion_tokens") or 0),
            (self.first_s or ended_s) - self.began_s,
            ended_s - self.began_s,
            headers.get("x-macfabric-node") or "",
            headers.get("x-macfabric-cache") or "",
        )
        calls = tuple(
            WantedCall(name, read_arguments("".join(parts)), own)
            for _, (own, name, *parts) in sorted(self.calls.items())
        )
        return SpokenAnswer("".join(self.texts), calls, figures)


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline(SCENARIO_LINE_BYTES_MAX):
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[len(b"data: ") :])
        error = chunk.get("error")
        if error:
            raise AskAgainError(str(error.get("message")), WAIT_S)
        yield chunk


def _require_answered(response: http.client.HTTPResponse, raw: bytes) -> None:
    """Raise AskAgainError for what may be answered later."""
    if response.status not in LATER:
        return
    try:
        error = json.loads(raw)["error"]
        why, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        why, code = f"the fabric answered {response.status}", None
    if code in FINAL:
        raise RunRefusedError(why)
    asked = response.headers.get("retry-after") or ""
    raise later_error(why, float(asked) if asked.isdecimal() else WAIT_S, code)


@contextmanager
def _in_words() -> Iterator[None]:
    """Tell a run of what broke in its own words."""
    try:
        yield
    except CommandError as error:
        message = str(error)
        if isinstance(error.__context__, OSError | http.client.HTTPException):  # nobody answers
            raise AskAgainError(message, WAIT_S) from None
        raise RunRefusedError(message) from None
