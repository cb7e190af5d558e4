"""Streamed answers in Anthropic's dialect: blocks are opened, filled and closed in turn."""

import json
from collections.abc import Iterator
from typing import Any

from fabric.turn.generation import Delta, ToolCall, ToolCallPart
from router.anthropic.shape import arguments_of, signature, text_block, tool_use_block
from router.http.sse import frame


class BlockStream:
    """Events of content blocks, from deltas and calls."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._streamed_ids: set[str] = set()  # of calls that came in parts
        self._index = -1
        self._open: str | None = None
        self._open_call = ""  # id of the call whose block is open
        self._blank = ""  # leading blanks, until text follows
        self._thoughts: list[str] = []  # of the open block

    def add_delta(self, delta: Delta) -> Iterator[bytes]:
        """Frame a piece of text or reasoning."""
        if delta.reasoning:
            if self._shows_thoughts:
                yield from self._think(delta.text)
            return
        text = self._blank + delta.text
        if self._open != "text" and not text.strip():
            self._blank = text  # clients send blocks back, and an empty one is refused
            return
        self._blank = ""
        if self._open != "text":
            yield from self._begin("text", text_block(""))
        yield self._delta({"type": "text_delta", "text": text})

    def _think(self, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._open != "thinking":
            begun = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begin("thinking", begun)
        self._thoughts.append(text)
        yield self._delta({"type": "thinking_delta", "thinking": text})

    def add_call_part(self, part: ToolCallPart) -> Iterator[bytes]:
        """Frame a piece of a call."""
        if part.name:
            self._streamed_ids.add(part.id)
            block = tool_use_block(ToolCall(part.name, "", part.id), {})
            yield from self._begin("tool_use", block)
            self._open_call = part.id
        if part.arguments and self._open == "tool_use" and self._open_call == part.id:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def add_call(self, call: ToolCall) -> Iterator[bytes]:
        """Frame a whole call, unless it came in parts."""
        if call.id in self._streamed_ids:
            if self._open == "tool_use" and self._open_call == call.id:
                yield from self.close()
            return
        yield from self._begin("tool_use", tool_use_block(call, {}))
        spelled = call.arguments
        if not call.is_broken:
            spelled = json.dumps(arguments_of(call), ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": spelled})
        yield from self.close()

    def end(self) -> Iterator[bytes]:
        """Close the last block; send an empty one if there was none."""
        if self._index < 0:
            yield from self._begin("text", text_block(""))
        yield from self.close()

    def close(self) -> Iterator[bytes]:
        """Close the open block, if any."""
        self._blank = ""
        if self._open is None:
            return
        if self._open == "thinking":
            signed = signature("".join(self._thoughts))
            yield self._delta({"type": "signature_delta", "signature": signed})
            self._thoughts.clear()
        self._open = None
        yield named({"type": "content_block_stop", "index": self._index})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        self._index += 1
        self._open = kind
        yield named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named({"type": "content_block_delta", "index": self._index, "delta": delta})


def named(event: dict[str, Any]) -> bytes:
    """Frame an event under the name of its type."""
    return frame(event, event["type"])
