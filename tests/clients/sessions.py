"""Sessions of coding agents and chats: the scripted model's answers, and each turn's reuse."""

import json
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fabric.turn.generation import GenerateRequest
from fabric.turn.messages import MessageRole
from router.http import json_body
from router.policies.truncation import Truncation
from tests.clients.obedience import ENDLESS, GREETING, Obeying, answer, obeying
from tests.support.obedient_model import ScriptedTurn
from tests.support.template_shapes import ScriptedAnswer

CONTEXT_TOKENS = 81_920
FIRST = "Say hello, please."
LOOK, SEARCH = "Look at the screenshot", "Search the web for lamps."
READERS = ("Read", "read", "read_file", "view_image")
SEARCHERS = ("WebSearch", "search_web")
PICTURE = re.compile(r'data:image/\w+;base64,[\w+/]{40}|"media_type": "image/')
LAMPS = 700  # of a paste: about 11,000 tokens
WARM_MIN = 0.9
PARTIAL_TOKENS = 512  # of a prefix shared with another agent: it has whole blocks only


def session_answer(request: GenerateRequest) -> ScriptedAnswer:
    """Read the picture, search, or answer as for the other clients."""
    messages = request.messages or ()
    last_user = max((i for i, m in enumerate(messages) if m.role is MessageRole.USER), default=0)
    question = "".join(messages[last_user].texts) if messages else ""
    if FIRST in question and ENDLESS in question:
        return ScriptedAnswer(GREETING, "It quotes the conversation.")  # of a request for a summary
    if not any(message.role is MessageRole.TOOL for message in messages[last_user:]):
        tools = {tool["function"]["name"]: tool["function"] for tool in request.tools or ()}
        picture = re.search(rf"{LOOK} (/\S+\.png)", question)
        reader = next((name for name in READERS if name in tools), None)
        searcher = next((name for name in SEARCHERS if name in tools), None)
        if picture is not None and reader is not None:
            needed = tools[reader]["parameters"].get("required", ())
            return ScriptedAnswer("", "A look.", (reader, dict.fromkeys(needed, picture[1])))
        if SEARCH in question and searcher is not None:
            return ScriptedAnswer("", "A search.", (searcher, {"query": "lamps"}))
    return answer(request)


def screenshot() -> bytes:
    """Return a small PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + bytes([40, 90, 200]) * 64 for _ in range(48))
    head = struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def paste(number: int) -> str:
    """Return a question after a long text, different for each number."""
    lamps = (
        f"Lamp {lamp} of pier {number} shines {lamp * 7919 % 997} times." for lamp in range(LAMPS)
    )
    return f"Keep these notes: {' '.join(lamps)} Say hello."


@dataclass(frozen=True)
class Figure:
    """Request of a session's phase: its reused tokens, and those that it could have reused."""

    phase: str
    prompt_tokens: int
    cached_tokens: int
    common_tokens: int  # common with an earlier prompt and its answer
    is_main: bool  # not a title, a search or another auxiliary request of the program

    @property
    def warm(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def lost_tokens(self) -> int:
        """Cached tokens that were computed again."""
        return max(0, self.common_tokens - self.cached_tokens)

    def __str__(self) -> str:
        note = "" if self.is_main else "  (beside the conversation)"
        return (
            f"{self.phase:12} {self.cached_tokens:6} of {self.prompt_tokens:6} cached = "
            f"{self.warm:6.1%}, in common with earlier prompts {self.common_tokens:6}{note}"
        )


@dataclass(frozen=True)
class Seen:
    """Requests and truncations in the router."""

    bodies: list[dict[str, Any]] = field(default_factory=list)  # bodies of all requests, as sent
    dropped: list[int] = field(default_factory=list)  # messages, per truncated prompt


@dataclass
class Session:
    """The turns of one program's session on a fabric, by phase."""

    rig: Obeying
    seen: Seen
    figures: list[Figure] = field(default_factory=list)
    _tools: tuple[str, ...] | None = None  # of the conversation's requests
    _contexts: list[np.ndarray] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[list[ScriptedTurn]]:
        """Record the requests of a block of code; the list is filled at its end."""
        seen: list[ScriptedTurn] = []
        since = len(self.rig.model.turns)
        yield seen
        seen += self.rig.model.turns[since:]
        if self._tools is None and seen:
            self._tools = max((_tools_of(turn) for turn in seen), key=len)
        for turn in seen:
            ids = np.array(turn.prompt_ids)
            common = max((_common(ids, context) for context in self._contexts), default=0)
            is_main = _tools_of(turn) == self._tools
            figure = Figure(name, len(ids), turn.cached_tokens, common, is_main)
            print(figure)
            self.figures.append(figure)
            self._contexts.append(np.array([*turn.prompt_ids, *turn.sequence.answer_ids]))

    def offered(self, kind: str) -> bool:
        """Return whether a request had a hosted tool of this kind."""
        lists = [body.get("tools") or () for body in self.seen.bodies]
        return any(str(tool.get("type")).startswith(kind) for tools in lists for tool in tools)

    def showed_picture(self) -> bool:
        """Return whether a request had a picture, in any dialect."""
        return any(PICTURE.search(json.dumps(body)) for body in self.seen.bodies)


def _tools_of(turn: ScriptedTurn) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in turn.request.tools or ())


def _common(ids: np.ndarray, context: np.ndarray) -> int:
    length = min(len(ids), len(context))
    differing = np.flatnonzero(ids[:length] != context[:length])
    return int(differing[0]) if len(differing) else min(length, len(ids) - 1)


@contextmanager
def session_fabric(folder: Path) -> Iterator[tuple[Obeying, Seen]]:
    """Serve the scripted model with a small context, and record bodies and truncations."""
    seen = Seen()
    read, apply = json_body._object, Truncation.apply

    def read_and_record(texts: list[str]) -> dict[str, Any]:
        body = read(texts)
        seen.bodies.append(body)
        return body

    async def applied(self: Truncation, *arguments: Any) -> Any:
        prompt, outcome = await apply(self, *arguments)
        if outcome.count:
            seen.dropped.append(outcome.count)
        return prompt, outcome

    with (
        mock.patch.object(json_body, "_object", read_and_record),
        mock.patch.object(Truncation, "apply", applied),
        obeying(
            folder,
            answers=session_answer,
            context_tokens=CONTEXT_TOKENS,
            router={"truncation": "auto"},
        ) as rig,
    ):
        yield rig, seen
