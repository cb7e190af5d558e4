"""Read answers that are several messages, each with a header that says what it is: gpt-oss's.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

import re
from enum import StrEnum
from typing import Any, Final

from fabric.turn.call_choice import ANY_CALLS, CallChoice
from node.dialect.call_body import CallBody
from node.dialect.call_log import CallLog
from node.dialect.headed_calls import HeadedCalls
from node.dialect.marks import marks_of
from node.dialect.shown import Shown
from node.dialect.stop_strings import StopStrings

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
# Efforts of other families, and the nearest that these know.
HARMONY_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
FINAL: Final = (f"{CHANNEL}final", MESSAGE)  # of an answer's last message, the text to its header
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
    """Shows analysis as reasoning, calls of functions as calls, and all else as text."""

    def __init__(
        self,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        call_seed: str,
        choice: CallChoice = ANY_CALLS,
    ) -> None:
        self._tools = tools
        self._names = frozenset(choice.names) or None
        self._part = _Part.HEADER
        self._header = ""
        self._is_named = False  # the header has a mark, or the prompt has begun it
        self._left = ""  # may be the beginning of a mark
        self._raw = ""  # of the message that is a call
        self._body: CallBody | None = None
        self._log = CallLog(call_seed, takes_one=choice.takes_one)
        self._stops = StopStrings(stop)
        self._gaps = dict.fromkeys((_Part.TEXT, _Part.THOUGHT), "")
        self._has_said: set[_Part] = set()
        self.broken_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._log.ended_count > 0

    def begin(self, tail: str) -> None:
        self.feed(tail)
        self._left = ""
        self._stops.begin_again()
        self._has_said = set()

    def feed(self, text: str) -> Shown:
        shown = Shown()
        self._left += text
        while self._left and self._stops.found is None:
            text, mark, self._left = marks_of(MARKS).split(self._left)
            if text:
                self._take(text, shown)
            if mark is not None:
                self._cross(mark, shown)
            elif not text:
                break
        shown.stopped_by = self._stops.found
        return shown

    def finish(self) -> Shown:
        shown = Shown()
        if self._left:
            left, self._left = self._left, ""
            self._take(left, shown)
        if self._part is _Part.HEADER and self._is_call(self._header):
            self.broken_calls += 1
            shown.text += self._header
        elif self._part is _Part.HEADER and not self._is_named:
            shown.text += self._header
        self._end_message(shown)
        shown.text += self._stops.finish()
        return shown

    def _take(self, text: str, shown: Shown) -> None:
        if self._part is _Part.HEADER:
            self._header += text
            said = self._header.lstrip()
            if not self._is_named and said and not _TO.startswith(said[: len(_TO)]):
                self._part, self._header = _Part.TEXT, ""  # a model that left its header out
                self._say(said, shown)
        elif self._part is _Part.CALL:
            self._raw += text
            assert self._body is not None, "a call has one"
            self._log.show(self._body.feed(text), shown)
        else:
            self._say(text, shown)

    def _say(self, text: str, shown: Shown) -> None:
        if self._gaps[self._part]:
            text, self._gaps[self._part] = self._gaps[self._part] + text, ""
        self._has_said.add(self._part)
        if self._part is _Part.THOUGHT:
            shown.reasoning += text
        else:
            shown.text += self._stops.take(text)

    def _cross(self, mark: str, shown: Shown) -> None:
        if self._body is not None and self._body.is_in_value:
            self._take(mark, shown)  # a text that speaks of marks
        elif mark == MESSAGE and self._part is _Part.HEADER:
            self._open_message(shown)
        elif self._part is _Part.HEADER and mark not in _ENDS:
            self._header = mark if mark == START else self._header + mark
            self._is_named = True
        else:
            self._end_message(shown)
            self._header = "" if mark in _ENDS else mark
            self._is_named = True

    def _open_message(self, shown: Shown) -> None:
        header, self._header = self._header, ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if self._is_call(header):
            assert recipient is not None, "it is a call by its recipient"
            self._part, self._raw = _Part.CALL, header + MESSAGE
            self._body = HeadedCalls(self._tools, _CALL, _SPACE)
            self._body.names = self._names
            name = recipient[1].split("<|")[0].removeprefix("functions.")
            self._log.show(self._body.feed(f"{name}\n"), shown)
        elif channel is not None and channel[1] == "analysis":
            self._part = _Part.THOUGHT
        else:
            self._part = _Part.TEXT
            if recipient is not None:  # a call of what nobody offered
                self._say(header + MESSAGE, shown)

    def _is_call(self, header: str) -> bool:
        recipient = _RECIPIENT.search(header)
        return self._tools is not None and recipient is not None

    def _end_message(self, shown: Shown) -> None:
        if self._part in self._has_said:
            self._gaps[self._part] = "\n\n"
        if self._part is _Part.TEXT:
            shown.text += self._stops.finish()
        body, self._body = self._body, None
        self._part = _Part.HEADER
        if body is None:
            return
        if not body.has_failed and not body.calls_count and self._raw.endswith(MESSAGE):
            self._log.show(body.feed("{}"), shown)  # nothing to say
        self._log.show(body.close(is_cut=False), shown)
        if body.has_failed:
            self.broken_calls += 1
            shown.text += self._raw
