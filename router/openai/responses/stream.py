"""StreamParts responses: items are added, filled and completed in turn, in numbered events."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.turn.generation import Delta, TokenLogprob, ToolCall, ToolCallPart
from router.fresh_ids import fresh_name
from router.http.sse import frame
from router.openai.responses.shape import ResponseShape


@dataclass(slots=True)
class _Open:
    """Item that is being filled."""

    kind: str
    name: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ThoughtWords:
    """Words of the events and parts of a thought: as content, or as its summary."""

    text: str
    part: str
    type: str
    index: str


_CONTENT: Final = _ThoughtWords("reasoning_text", "content_part", "reasoning_text", "content_index")
_SUMMARY: Final = _ThoughtWords(
    "reasoning_summary_text", "reasoning_summary_part", "summary_text", "summary_index"
)


@dataclass(slots=True)
class _OpenCall:
    """Call that is being generated."""

    id: str
    key: str  # of its text in the item
    item: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return "custom_tool_call_input" if self.key == "input" else "function_call_arguments"


class ItemStream:
    """Events of items, from deltas and calls; `output` has the completed items."""

    def __init__(self, shape: ResponseShape) -> None:
        self.output: list[Any] = []
        self.reasoning_tokens = 0
        self._shape = shape
        self._count = 0
        self._open: _Open | None = None
        self._streamed_ids: set[str] = set()  # of calls that came in parts
        self._blank = ""  # leading blanks, until text follows
        self._call: _OpenCall | None = None

    def event(self, kind: str, **more: Any) -> bytes:
        """Frame an event with its number."""
        event = {"type": kind, "sequence_number": self._count, **more}
        self._count += 1
        return frame(event, kind)

    def add_delta(self, delta: Delta) -> Iterator[bytes]:
        """Frame a piece of text or reasoning."""
        if delta.reasoning:
            self.reasoning_tokens = delta.index + 1
            if delta.text:
                yield from self._fill("reasoning", delta.text, ())
            return
        text = self._blank + delta.text
        is_open = self._open is not None and self._open.kind == "message"
        if not is_open and not text.strip() and not delta.logprobs:
            self._blank = text  # blanks alone are no item
            return
        yield from self._fill("message", text, delta.logprobs)

    def add_call_part(self, part: ToolCallPart) -> Iterator[bytes]:
        """Frame a piece of a call; a custom tool's call is sent whole."""
        if part.name:
            call = ToolCall(part.name, "", part.id)
            if self._shape.request.tools.name_of(call).is_custom:
                return
            self._streamed_ids.add(part.id)
            yield from self._begin_call(call)
        if self._call is not None and self._call.id == part.id and part.arguments:
            yield self._add_arguments(self._call, part.arguments)

    def add_call(self, call: ToolCall) -> Iterator[bytes]:
        """Frame the rest of a call, or a whole one."""
        if self._call is None or self._call.id != call.id:
            if call.id and call.id in self._streamed_ids:
                return
            yield from self._begin_call(call)
            assert self._call is not None, "just begun"
            yield self._add_arguments(self._call, self._shape.call(call)[self._call.key])
        yield from self._end_call("incomplete" if call.is_broken else "completed")

    def _begin_call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self.close()
        item = self._shape.call(call)
        key = "input" if item["type"] == "custom_tool_call" else "arguments"
        self._call = _OpenCall(call.id, key, {**item, key: "", "status": "in_progress"})
        index = len(self.output)
        yield self.event("response.output_item.added", output_index=index, item=self._call.item)

    def _add_arguments(self, call: "_OpenCall", text: str) -> bytes:
        call.texts.append(text)
        where = {"item_id": call.item["id"], "output_index": len(self.output)}
        return self.event(f"response.{call.kind}.delta", **where, delta=text)

    def _end_call(self, status: str) -> Iterator[bytes]:
        assert self._call is not None, "one is open"
        call, self._call = self._call, None
        text = {call.key: "".join(call.texts)}
        where = {"item_id": call.item["id"], "output_index": len(self.output)}
        yield self.event(f"response.{call.kind}.done", **where, **text)
        yield self._done({**call.item, **text, "status": status})

    def end(self, *, is_cut: bool) -> Iterator[bytes]:
        """Close the last item; add an empty one if there was no text or call."""
        has_some = any(item["type"] != "reasoning" for item in self.output)
        if not has_some and (self._open is None or self._open.kind != "message"):
            yield from self._begin("message")
        yield from self.close(is_cut=is_cut)

    def close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        """Close the open item, if any."""
        self._blank = ""
        if self._call is not None:  # its node broke off
            yield from self._end_call("incomplete")
        if self._open is None:
            return
        item, self._open = self._open, None
        text, where = "".join(item.texts), self._where(item)
        if item.kind == "reasoning":
            words = self._thought_words
            yield self.event(f"response.{words.text}.done", **where, text=text)
            part: dict[str, Any] = {"type": words.type, "text": text}
            yield self.event(f"response.{words.part}.done", **where, part=part)
            yield self._done(self._shape.reasoning(item.name, text))
            return
        logprobs = self._shape.logprobs(item.logprobs)
        yield self.event("response.output_text.done", **where, text=text, logprobs=logprobs)
        part = self._shape.text_part(text, item.logprobs)
        yield self.event("response.content_part.done", **where, part=part)
        status = "incomplete" if is_cut else "completed"
        yield self._done(self._shape.message(item.name, text, item.logprobs, status))

    def _fill(self, kind: str, text: str, logprobs: tuple[TokenLogprob, ...]) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None, "just begun"
        self._blank = ""
        self._open.texts.append(text)
        self._open.logprobs.extend(logprobs)
        where = self._where(self._open)
        if kind == "reasoning":
            yield self.event(f"response.{self._thought_words.text}.delta", **where, delta=text)
        else:
            probabilities = self._shape.logprobs(logprobs)
            yield self.event(
                "response.output_text.delta", **where, delta=text, logprobs=probabilities
            )

    def _begin(self, kind: str) -> Iterator[bytes]:
        yield from self.close()
        is_thought = kind == "reasoning"
        self._open = opened = _Open(kind, fresh_name("rs_" if is_thought else "msg_"))
        index = len(self.output)
        item: dict[str, Any] = {"id": opened.name, "type": kind, "content": []}
        if is_thought:
            words = self._thought_words
            item["summary"] = []
            name, part = words.part, {"type": words.type, "text": ""}
        else:
            item |= {"status": "in_progress", "role": "assistant"}
            name, part = "content_part", self._shape.text_part("", ())
        yield self.event("response.output_item.added", output_index=index, item=item)
        yield self.event(f"response.{name}.added", **self._where(opened), part=part)

    @property
    def _thought_words(self) -> "_ThoughtWords":
        return _SUMMARY if self._shape.request.summarizes_thoughts else _CONTENT

    def _where(self, opened: _Open) -> dict[str, Any]:
        index = self._thought_words.index if opened.kind == "reasoning" else "content_index"
        return {"item_id": opened.name, "output_index": len(self.output), index: 0}

    def _done(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        index = len(self.output) - 1
        return self.event("response.output_item.done", output_index=index, item=item)
