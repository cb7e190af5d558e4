"""Client of a fabric's public HTTP API for scenario runs: one thread for each request."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from fabric.errors import FabricError
from fabric.turn.messages import Message, template_form
from router.runs.in_process import FINAL_CODES, RETRYABLE_STATUSES
from router.scenario.fabric_client import (
    RETRY_WAIT_S,
    AgentAnswer,
    AgentCopy,
    AskAgainError,
    Question,
    RequestedCall,
    TurnFigures,
    read_arguments,
    run_operations,
    temporary_error,
)

CHAT = "/v1/chat/completions"
COPY_S = 600.0


@dataclass(frozen=True)
class HttpFabricClient:
    """Client of a fabric for the tenant of an HTTP client's key."""

    http: httpx2.Client
    model: str

    async def ask(self, question: Question) -> AgentAnswer:
        return await asyncio.to_thread(self._ask, question)

    async def fork(self, source: str, copy: str, to: str | None, op: str) -> AgentCopy:
        body = {"as": copy, "operation": op} | ({"to": to} if to is not None else {})
        receipt = await self._call("POST", f"{source}/fork", body)
        return AgentCopy(receipt.get("node") or receipt["to"], receipt.get("bytes_sent") or 0)

    async def direct(self, agent: str, items: Sequence[Mapping[str, Any]], op: str) -> None:
        body = {"directives": list(items), "operation": op}
        if not await self._call("POST", f"{agent}/directives", body, may_be_gone=True):
            message = f"no node has {agent}"
            raise AskAgainError(message, RETRY_WAIT_S)

    async def run_edits(self, agent: str) -> frozenset[str] | None:
        memory = await self._call("GET", f"{agent}/directives", may_be_gone=True)
        if not memory:
            return None
        return frozenset(run_operations(each["operation"] for each in memory["directives"]))

    async def undo_edits(self, agent: str) -> bool:
        held = await self.run_edits(agent) or ()
        for operation in held:
            await self._call("DELETE", f"{agent}/directives/{operation}", may_be_gone=True)
        return bool(held)

    async def move(self, agent: str, to: str) -> AgentCopy:
        receipt = await self._call("POST", f"{agent}/migrate", {"to": to})
        return AgentCopy(receipt["to"], receipt.get("bytes_sent") or 0)

    async def nodes(self) -> tuple[str, ...]:
        rows = (await asyncio.to_thread(self.http.get, "/v1/nodes")).json()["data"]
        return tuple(row["name"] for row in rows if row.get("state") == "ready")

    async def owners(self, agents: Sequence[str]) -> dict[str, str]:
        rows = {agent: await self._call("GET", agent, may_be_gone=True) for agent in agents}
        return {agent: row["owner"] for agent, row in rows.items() if row.get("owner")}

    async def prefetch(self, agent: str) -> None:
        await self._call("POST", f"{agent}/prefetch", {})

    async def erase(self, agent: str) -> None:
        await self._call("DELETE", agent, may_be_gone=True)

    async def _call(
        self, method: str, path: str, body: object = None, *, may_be_gone: bool = False
    ) -> Any:
        def call() -> Any:
            with _broken_connections():
                response = self.http.request(
                    method, f"/v1/agents/{path}", json=body, timeout=COPY_S
                )
            if may_be_gone and response.status_code == 404:
                return {}
            _require_ok(response)
            return response.json()

        return await asyncio.to_thread(call)

    def _ask(self, question: Question) -> AgentAnswer:
        body, headers = chat_body(question, self.model), {"x-agent-id": question.agent}
        started_s = time.monotonic()
        with (
            _broken_connections(),
            self.http.stream("POST", CHAT, json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                response.read()
                _require_ok(response)
            answer = _Answer(started_s)
            for chunk in self._chunks(question, response):
                answer.add(chunk)
            return answer.finished(response.headers)

    def _chunks(self, _: Question, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("error"):
                    raise AskAgainError(chunk["error"]["message"], RETRY_WAIT_S)
                yield chunk


def chat_body(question: Question, model: str) -> dict[str, Any]:
    """Write a question as a streamed chat of OpenAI's API."""
    options = question.options
    chosen = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in question.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {name: value for name, value in chosen.items() if value is not None}
    if question.tools:
        body["tools"] = [dict(tool) for tool in question.tools]
    if options.edits is not None:
        body["macfabric"] = {"edits": options.edits.value}
    return body


def _message(message: Message) -> dict[str, Any]:
    spelled = template_form(message)
    for use in spelled.get("tool_calls", ()):
        arguments = use["function"]["arguments"]
        if not isinstance(arguments, str):
            use["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return spelled


@dataclass
class _Answer:
    """An answer assembled from its chunks."""

    started_s: float
    first_s: float | None = None
    texts: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # id, name, parts of arguments
    usage: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if has_words(delta) and self.first_s is None:
                self.first_s = time.monotonic()
            self.texts.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                call_parts = [call.get("id") or "", function.get("name") or ""]
                self.calls.setdefault(int(call["index"]), call_parts).append(
                    function.get("arguments") or ""
                )
            self.is_whole |= choice.get("finish_reason") is not None

    def finished(self, headers: Mapping[str, str]) -> AgentAnswer:
        if not self.is_whole:
            message = "the stream ended before the answer"
            raise AskAgainError(message, RETRY_WAIT_S)
        ended_s = time.monotonic()
        figures = TurnFigures(
            int(self.usage.get("prompt_tokens") or 0),
            int(headers.get("x-macfabric-cached-tokens") or 0),
            int(self.usage.get("completion_tokens") or 0),
            (self.first_s or ended_s) - self.started_s,
            ended_s - self.started_s,
            headers.get("x-macfabric-node") or "",
            headers.get("x-macfabric-cache") or "",
        )
        calls = tuple(
            RequestedCall(name, read_arguments("".join(parts)), call_id)
            for _, (call_id, name, *parts) in sorted(self.calls.items())
        )
        return AgentAnswer("".join(self.texts), calls, figures)


def has_words(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def _require_ok(response: httpx2.Response) -> None:
    """Raise AskAgainError for a temporary refusal, FabricError for any other."""
    if response.status_code < 400:
        return
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = f"the fabric answered {response.status_code}", None
    if response.status_code not in RETRYABLE_STATUSES or code in FINAL_CODES:
        raise FabricError(message)
    retry_after = response.headers.get("retry-after") or ""
    raise temporary_error(
        message, float(retry_after) if retry_after.isdecimal() else RETRY_WAIT_S, code
    )


@contextmanager
def _broken_connections() -> Iterator[None]:
    try:
        yield
    except httpx2.TransportError as error:
        raise AskAgainError(str(error) or type(error).__name__, RETRY_WAIT_S) from None
