"""Reader of answers in the harmony format: several messages, each with a header.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

import re
from enum import StrEnum
from typing import Any, Final

from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from node.dialect.answer_delta import AnswerDelta, CallCollector
from node.dialect.call_reader import CallReader
from node.dialect.formats import ThoughtStage
from node.dialect.json_calls import HeaderCallReader
from node.dialect.text_filters import StopStrings, compile_marks

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
CALL_END: Final = "<|call|>"
MESSAGE_END: Final = "<|end|>"
_ENDS: Final = (MESSAGE_END, "<|return|>", CALL_END)
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_TO: Final = "to="
_CALL: Final = re.compile(r"(?P<name>\S+)\n\s*(?=\{)")
_SPACE: Final = re.compile(r"\s*")


class _Part(StrEnum):
    HEADER = "header"
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


class HarmonyReader:
    """Reader that shows analysis as reasoning, calls as calls, and everything else as text."""

    def __init__(
        self,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        call_seed: str,
        choice: CallChoice = ANY_CALLS,
    ) -> None:
        self._tools = tools
        self._names = frozenset(choice.names) or None
        self._takes_one = choice.takes_one
        self._call_seed = call_seed
        self._stop = stop
        self._reset()

    def _reset(self) -> None:
        self._part = _Part.HEADER
        self._header = ""
        self._has_header = False  # a mark began it, in the prompt or the answer
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._unread = ""  # may begin a mark
        self._raw = ""  # text of the message, if it is a call
        self._call_reader: CallReader | None = None
        self._collector = CallCollector(self._call_seed, takes_one=self._takes_one)
        self._stops = StopStrings(self._stop)
        self._gaps = dict.fromkeys((_Part.TEXT, _Part.THOUGHT), "")
        self._shown_parts: set[_Part] = set()
        self.broken_calls = 0
        self.has_cut_call = False

    @property
    def has_calls(self) -> bool:
        return self._collector.ended_count > 0

    @property
    def stage(self) -> ThoughtStage:
        if self._part is _Part.THOUGHT:
            return ThoughtStage.THOUGHT
        # The name of the channel comes next.
        is_open = self._part is _Part.HEADER and self._header.endswith(CHANNEL)
        is_open = is_open and not (self._unread or self._is_call(self._header))
        return ThoughtStage.OPEN if is_open else ThoughtStage.ELSEWHERE

    def begin(self, begun: str) -> None:
        """Start an answer that the prompt has begun; discard any earlier one."""
        self._reset()
        self._stops = StopStrings(())
        self.feed(begun)
        if self._part is _Part.CALL:
            self._part = _Part.TEXT  # a call in `begun` counts as text
        self._forget_parts()

    def feed(self, text: str) -> AnswerDelta:
        delta = AnswerDelta()
        self._unread += text
        while self._unread and self._stops.matched is None:
            text, mark, self._unread = compile_marks(MARKS).split(self._unread)
            if text:
                self._read_text(text, delta)
            if mark is not None:
                self._read_mark(mark, delta)
            elif not text:
                break
        delta.stopped_by = self._stops.matched
        return delta

    def finish(self, *, is_cut: bool = False) -> AnswerDelta:
        delta = AnswerDelta()
        if self._unread:
            rest, self._unread = self._unread, ""
            self._read_text(rest, delta)
        if self._part is _Part.HEADER and self._is_call(self._header):
            self.broken_calls += 1
            delta.text += "" if is_cut else self._header
        elif self._part is _Part.HEADER and not self._has_header:
            delta.text += self._header
        self._end_message(delta, is_cut=is_cut)
        delta.text += self._stops.flush()
        return delta

    def _read_text(self, text: str, delta: AnswerDelta) -> None:
        if self._part is _Part.HEADER:
            self._header += text
            start = self._header.lstrip()
            if not self._has_header and start and not _TO.startswith(start[: len(_TO)]):
                self._part, self._header = _Part.TEXT, ""  # the model omitted its header
                self._show(start, delta)
        elif self._part is _Part.CALL:
            self._raw += text
            assert self._call_reader is not None, "a call has a reader"
            self._collector.collect(self._call_reader.feed(text), delta)
        else:
            self._show(text, delta)

    def _show(self, text: str, delta: AnswerDelta) -> None:
        if self._gaps[self._part]:
            text, self._gaps[self._part] = self._gaps[self._part] + text, ""
        self._shown_parts.add(self._part)
        if self._part is _Part.THOUGHT:
            delta.reasoning += text
        else:
            delta.text += self._stops.feed(text)

    def _read_mark(self, mark: str, delta: AnswerDelta) -> None:
        if self._call_reader is not None and self._call_reader.is_in_value:
            self._read_text(mark, delta)  # a text about marks
        elif mark == MESSAGE and self._part is _Part.HEADER:
            self._open_message(delta)
        elif self._part is _Part.HEADER and mark not in _ENDS:
            self._header = mark if mark == START else self._header + mark
            self._has_header = True
        else:
            self._end_message(delta)
            self._header = "" if mark in _ENDS else mark
            self._has_header = True

    def _open_message(self, delta: AnswerDelta) -> None:
        header, self._header = self._header, ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if self._is_call(header):
            assert recipient is not None, "a call has a recipient"
            self._part, self._raw = _Part.CALL, header + MESSAGE
            self._call_reader = HeaderCallReader(self._tools, _CALL, _SPACE)
            self._call_reader.names = self._names
            name = recipient[1].split("<|")[0].removeprefix("functions.")
            self._collector.collect(self._call_reader.feed(f"{name}\n"), delta)
        elif channel is not None and channel[1] == "analysis":
            self._part = _Part.THOUGHT
        else:
            self._part = _Part.TEXT
            if recipient is not None:  # a call, though there are no tools
                self._show(header + MESSAGE, delta)

    def _is_call(self, header: str) -> bool:
        recipient = _RECIPIENT.search(header)
        return self._tools is not None and recipient is not None

    def _end_message(self, delta: AnswerDelta, *, is_cut: bool = False) -> None:
        if self._part in self._shown_parts:
            self._gaps[self._part] = "\n\n"
        if self._part is _Part.TEXT:
            delta.text += self._stops.flush()
        reader, self._call_reader = self._call_reader, None
        self._part = _Part.HEADER
        if reader is None:
            return
        if not reader.has_failed and not reader.calls_count and self._raw.endswith(MESSAGE):
            self._collector.collect(reader.feed("{}"), delta)  # no arguments
        self._collector.collect(reader.close(is_cut=False), delta)
        if reader.has_failed:
            self.broken_calls += 1
            has_begun = self._collector.break_off(delta)
            self.has_cut_call = is_cut and has_begun
            delta.text += "" if has_begun else self._raw
