"""Client of an OpenAI chat endpoint that notes when each part of an answer arrives."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPResponse
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from benchmarks.report import open_directly, say

PATIENCE_S = 60.0  # while a server is starting, or its queue is full
REQUEST_S = 3_600.0
RETRIED = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Answer to one request, with the times at which its parts arrived."""

    text: str
    began_s: float
    ended_s: float
    part_times_s: tuple[float, ...]  # of parts with text; a whole answer has one
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    headers: Mapping[str, str]  # with names in lower case
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments of called tools

    @property
    def ttft_s(self) -> float:
        """Seconds until the first text; until the end if there was none."""
        return (self.part_times_s or (self.ended_s,))[0] - self.began_s

    @property
    def total_s(self) -> float:
        """Seconds until the end of the answer."""
        return self.ended_s - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring parts."""
        return [later - earlier for earlier, later in pairwise(self.part_times_s)]

    @property
    def tokens_per_s(self) -> float:
        """Decode speed after the first token; 0 if there is no other."""
        spent_s = sum(self.gaps_s)
        return (self.completion_tokens - 1) / spent_s if spent_s else 0.0

    def message(self) -> Message:
        """Return the answer as a message of the conversation."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Client of a server's chat endpoint and, for macfabric's router, of its agents."""

    url: str
    model: str
    key: str | None = None

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        agent: str | None = None,
        streams: bool = True,
        ignore_eos: bool = True,
        temperature: float = 0.0,
        extra: Mapping[str, Any] = MappingProxyType({}),
        on_part: Callable[[int], None] = lambda _: None,
    ) -> ChatAnswer:
        """Ask for an answer, by default a greedy one.

        Call `on_part` with the number of parts that have arrived. `extra`: more fields of the body.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": 0,
            "stream": streams,
            **extra,
        }
        if ignore_eos:
            body["ignore_eos"] = True
        if streams:
            body["stream_options"] = {"include_usage": True}
        headers = {"x-agent-id": agent} if agent else {}
        began_s, response = self._post("/v1/chat/completions", body, headers)
        with response:
            reader = _Reader(on_part)
            reader.read(response, streams=streams)
            named = {name.lower(): value for name, value in response.headers.items()}
        return reader.answer(began_s, named)

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST a JSON body, and return the reply's."""
        _, response = self._post(path, body, {})
        with response:
            return dict(json.load(response))

    def timed_call(self, path: str, body: Mapping[str, Any]) -> float:
        """POST a JSON body; return the seconds until the reply was read."""
        began_s, response = self._post(path, body, {})
        with response:
            response.read()
        return time.perf_counter() - began_s

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON document."""
        with open_directly(self.url + path, REQUEST_S) as response:
            return dict(json.load(response))

    def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[float, HTTPResponse]:
        """Return when the request was sent, and its response; retry while the server asks for it.

        Raise RuntimeError with the server's message if it refuses the request.
        """
        sent = {"content-type": "application/json", **headers}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            began_s = time.perf_counter()
            request = urllib.request.Request(  # noqa: S310 - a server on this machine
                self.url + path, json.dumps(body).encode(), sent
            )
            try:
                return began_s, open_directly(request, REQUEST_S)
            except urllib.error.HTTPError as error:
                reason = error.read().decode(errors="replace")
                if error.code not in RETRIED or time.monotonic() > deadline_s:
                    message = f"{path}: HTTP {error.code}: {reason[:500]}"
                    raise RuntimeError(message) from error
                say(f"refused for now: {reason}")
                time.sleep(float(error.headers.get("retry-after", 1)))


class _Reader:
    """Reader of one response."""

    def __init__(self, on_part: Callable[[int], None]) -> None:
        self._on_part = on_part
        self._texts: list[str] = []
        self._times_s: list[float] = []
        self._calls: dict[int, tuple[str, str]] = {}
        self._usage: dict[str, Any] = {}
        self._ended_s = 0.0

    def read(self, response: HTTPResponse, *, streams: bool) -> None:
        """Read the response up to its end."""
        if streams:
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]), "delta")
        else:
            self._take(json.load(response), "message")
        self._ended_s = time.perf_counter()

    def _take(self, chunk: Mapping[str, Any], key: str) -> None:
        if "error" in chunk:
            message = f"the answer broke off: {chunk['error']}"
            raise RuntimeError(message)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or []:
            part = choice.get(key) or {}
            self._take_calls(part.get("tool_calls") or [])
            text = part.get("content") or part.get("reasoning") or part.get("reasoning_content")
            if text:
                self._texts.append(text)
                self._times_s.append(time.perf_counter())
                self._on_part(len(self._texts))

    def _take_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        for position, call in enumerate(calls):
            index, part = call.get("index", position), call.get("function") or {}
            name, arguments = self._calls.get(index, ("", ""))
            name, arguments = name + (part.get("name") or ""), arguments + part["arguments"]
            self._calls[index] = (name, arguments)

    def answer(self, began_s: float, headers: Mapping[str, str]) -> ChatAnswer:
        """Return what was read."""
        details = self._usage.get("prompt_tokens_details") or {}
        return ChatAnswer(
            text="".join(self._texts),
            began_s=began_s,
            ended_s=self._ended_s,
            part_times_s=tuple(self._times_s),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(self._usage.get("completion_tokens") or len(self._texts)),
            headers=headers,
            calls=tuple(self._calls.values()),
        )
