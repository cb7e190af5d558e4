"""A streamed answer of Anthropic's: blocks are opened, filled and closed one after the other."""

import json
from collections.abc import Iterator
from typing import Any

from fabric.turn.generation import Delta, ToolCall, ToolCallPart
from router.anthropic.shape import arguments_of, signature, text_block, tool_use_block
from router.http.sse import frame


class BlockStream:
    """Turns deltas and calls into the events of content blocks."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._told: set[str] = set()  # calls that came in parts, by their ids
        self._index = -1
        self._open: str | None = None
        self._blank = ""  # in front of a text that may not come
        self._thoughts: list[str] = []  # of the open block

    def say(self, delta: Delta) -> Iterator[bytes]:
        """Frame a piece of text or thought."""
        if delta.reasoning:
            if self._shows_thoughts:
                yield from self._think(delta.text)
            return
        text = self._blank + delta.text
        if self._open != "text" and not text.strip():
            self._blank = text  # an empty block is refused where it is sent back
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

    def part(self, part: ToolCallPart) -> Iterator[bytes]:
        """Frame more of a call that is being written."""
        if part.name:
            self._told.add(part.id)
            block = tool_use_block(ToolCall(part.name, "", part.id), {})
            yield from self._begin("tool_use", block)
        if part.arguments and part.id in self._told:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def call(self, call: ToolCall) -> Iterator[bytes]:
        """Frame one call, unless it came in parts."""
        if call.id in self._told:
            yield from self.close()
            return
        arguments = arguments_of(call)
        yield from self._begin("tool_use", tool_use_block(call, {}))
        spelled = json.dumps(arguments, ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": spelled})
        yield from self.close()

    def end(self) -> Iterator[bytes]:
        """Close the last block; an answer without any has an empty one."""
        if self._index < 0:
            yield from self._begin("text", text_block(""))
        yield from self.close()

    def close(self) -> Iterator[bytes]:
        """Close the open block, if there is one."""
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
    """Frame an event, which goes by its type."""
    return frame(event, event["type"])
