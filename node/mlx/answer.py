"""Turn an answer's tokens into text as they come: visible text, reasoning, tool calls, stop.

Keeps the exact text and offsets of every token for the agent's record, whatever is shown.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from json import dumps
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from fabric.turn.generation import ToolCall
from node.mlx.chat_tokenizer import ChatTokenizer

_ENDED = None


@dataclass(slots=True)
class Shown:
    """What one token adds to what the client sees."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    stopped_by: str | None = None


class Answer:
    """Text of one growing answer."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt_text: str,
        stop: tuple[str, ...],
        tools: list[Any] | None,
    ) -> None:
        wrapper = tokenizer.wrapper
        self._eos_ids = tokenizer.eos_ids
        self._end_texts = tokenizer.cut_texts
        self._tools = tools
        self._parser = wrapper.tool_parser if tools else None
        self._detokenizer = wrapper.detokenizer
        # Detokenizers strip a leading space at the start of a text; an answer has a prompt
        # before it, and its exact text must extend that.
        if "text" in vars(self._detokenizer):
            self._detokenizer.text = "\n"
            self._detokenizer.offset = 1
        self._stops = stop
        self._stop_state = _stop_machine(stop).make_state() if stop else None
        machine = make_text_state_machine(wrapper)
        self._state = machine.make_state(_initial_state(wrapper, prompt_text))
        self._call_text = ""
        self.text = ""
        self.ends: list[int] = []  # byte ends of tokens within this answer's text
        self._size_bytes = 0
        self._pending_count = 0
        self.has_calls = False

    def fork(self) -> "Answer":
        """Return an answer that goes on from here by itself."""
        twin = copy(self)
        twin.ends = list(self.ends)
        twin._detokenizer = detokenizer = copy(self._detokenizer)  # noqa: SLF001 - of this class
        detokenizer.tokens = list(detokenizer.tokens)
        if isinstance(detokenizer, NaiveStreamingDetokenizer):
            detokenizer._current_tokens = list(detokenizer._current_tokens)  # noqa: SLF001
        return twin

    def push(self, token: int) -> Shown:
        self._detokenizer.add_token(token)
        self._pending_count += 1
        segment = self._take_segment()
        if token in self._eos_ids:
            segment = segment.removesuffix(self._end_texts.get(token, b"").decode())
        return self._show(segment)

    def finish(self, *, stopped: bool) -> Shown:
        """Release what was held back; with `stopped`, text behind the stop is dropped."""
        self._detokenizer.finalize()
        segment = self._take_segment()
        self.ends += [self._size_bytes] * self._pending_count
        self._pending_count = 0
        if stopped:
            return Shown()
        shown = self._show(segment)
        if self._stop_state is not None:
            self._stop_state, held, _ = TextStateMachine.flush(self._stop_state)
            self._split(held, shown)
        self._state, held, state = TextStateMachine.flush(self._state)
        self._place(held, state, shown)
        self._end_call(shown)
        return shown

    def _take_segment(self) -> str:
        segment = self._detokenizer.last_segment
        if segment:
            self.text += segment
            self._size_bytes += len(segment.encode("utf-8", "replace"))
            self.ends += [self._size_bytes] * self._pending_count
            self._pending_count = 0
        return str(segment)

    def _show(self, segment: str) -> Shown:
        shown = Shown()
        if self._stop_state is None:
            self._split(segment, shown)
            return shown
        self._stop_state, parts = TextStateMachine.split(self._stop_state, segment)
        for name, text in parts:
            if name is not _ENDED:
                self._split(text, shown)
        if self._stop_state[0] is _ENDED:
            shown.stopped_by = self._found_stop()
        return shown

    def _found_stop(self) -> str:
        found = [(self.text.find(stop), stop) for stop in self._stops if stop in self.text]
        return min(found)[1] if found else self._stops[0]

    def _split(self, text: str, shown: Shown) -> None:
        if not text:
            return
        before = self._state[0]
        self._state, parts = TextStateMachine.split(self._state, text)
        for state, part in parts:
            if before == "tool" and state != "tool":
                self._end_call(shown)
            self._place(part, state, shown)
            before = state

    def _place(self, text: str, state: str | None, shown: Shown) -> None:
        if state == "tool" and self._parser is not None:
            self._call_text += text
        elif state == "reasoning":
            shown.reasoning += text
        else:
            shown.text += text

    def _end_call(self, shown: Shown) -> None:
        if not self._call_text:
            return
        calls = list(self._parse_calls(self._call_text))
        if calls:
            self.has_calls = True
            shown.calls += calls
        else:  # not a call after all: the client gets to see what the model said
            shown.text += self._call_text
        self._call_text = ""

    def _parse_calls(self, text: str) -> Iterator[ToolCall]:
        assert self._parser is not None, "only called with a parser"
        try:
            parsed = self._parser(text.strip(), self._tools)
        except Exception:  # noqa: BLE001 - model output: any parser failure means "no call"
            return
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if isinstance(call, dict) and isinstance(call.get("name"), str):
                arguments = call.get("arguments") or {}
                spelled = arguments if isinstance(arguments, str) else dumps(arguments)
                yield ToolCall(call["name"], spelled)


def _stop_machine(stop: tuple[str, ...]) -> TextStateMachine:
    return TextStateMachine({"normal": [(text, _ENDED) for text in stop]})


def _initial_state(wrapper: Any, prompt_text: str) -> str:
    """Start in reasoning where the template has already opened it."""
    state = wrapper.response_initial_state or "normal"
    if wrapper.has_thinking:
        opened = prompt_text.rfind(wrapper.think_start)
        if opened > prompt_text.rfind(wrapper.think_end):
            state = "reasoning"
    return str(state)
