"""Reader of answers that have marks around their thoughts and calls."""

from enum import StrEnum
from typing import Any

from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from node.dialect.answer_delta import AnswerDelta, CallCollector
from node.dialect.call_reader import CallReader
from node.dialect.formats import AnswerFormat
from node.dialect.text_filters import LineEndFilter, StopStrings, compile_marks


class Section(StrEnum):
    """Kinds of an answer's parts."""

    TEXT = "text"
    THOUGHT = "thought"
    CALLS = "calls"


class MarkedReader:
    """Reader of one answer; it looks for calls only if there are tools."""

    def __init__(
        self,
        format_: AnswerFormat,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        call_seed: str,
        choice: CallChoice = ANY_CALLS,
    ) -> None:
        """Read calls as `choice` allows: if some must come, a thought has none."""
        self._format = format_
        self._must_call = choice.must_call
        self._names = frozenset(choice.names) or None
        self._tools = tools
        self._section = Section.TEXT
        self._unread = ""  # may begin a mark
        has_marks = bool(self._marks())
        self._text = LineEndFilter(has_marks=has_marks)
        self._thought = LineEndFilter(has_marks=True)
        self._stops = StopStrings(stop)
        self._collector = CallCollector(call_seed, takes_one=choice.takes_one)
        self._call_reader: CallReader | None = None
        self._start = ""  # text of the mark that opened the section of calls
        self._raw = ""  # text within it
        self._is_bare = False  # it has no marks
        self._is_at_start = True  # no text since the last mark
        self.broken_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._collector.ended_count > 0

    def begin(self, tail: str) -> None:
        self.feed(tail)
        self._unread = ""
        self._text.reset()
        self._thought.reset()
        self._stops.reset()

    def feed(self, text: str) -> AnswerDelta:
        delta = AnswerDelta()
        self._unread += text
        self._run(delta)
        delta.stopped_by = self._stops.matched
        return delta

    def finish(self) -> AnswerDelta:
        delta = AnswerDelta()
        if self._unread:
            rest, self._unread = self._unread, ""
            self._read_text(rest, delta)
        if self._call_reader is not None:
            self._close_calls("", delta)
            self._run(delta)
            self._read_text(self._unread, delta)
        delta.reasoning += self._thought.flush()
        delta.text += self._text.feed(self._stops.flush()) + self._text.flush()
        return delta

    def _run(self, delta: AnswerDelta) -> None:
        while self._unread and self._stops.matched is None:
            marks = compile_marks(() if self._is_bare else self._marks())
            text, mark, self._unread = marks.split(self._unread)
            if text:
                self._read_text(text, delta)
            if mark is not None:
                self._read_mark(mark, delta)
            elif not text:
                break

    def _marks(self) -> tuple[str, ...]:
        """List the marks that end the current section or begin another."""
        thought, calls = self._format.thought, self._format.calls
        reads_calls = calls is not None and self._tools is not None
        starts = calls.starts if calls is not None and reads_calls else ()
        match self._section:
            case Section.CALLS:
                return (calls.end,) if calls is not None and calls.end else ()
            case Section.THOUGHT:
                assert thought is not None, "its mark opened the section"
                return (thought.end,) if self._must_call else (thought.end, *starts)
            case Section.TEXT:
                thoughts = (thought.start,) if thought is not None else ()
                return (*thoughts, *starts, *self._format.hidden_marks)

    def _read_text(self, text: str, delta: AnswerDelta) -> None:
        if self._section is Section.THOUGHT:
            delta.reasoning += self._thought.feed(self._thought.strip_after_mark(text))
        elif self._section is Section.CALLS or self._opens_bare_calls(text):
            self._read_calls(text, delta)
        else:
            self._show_text(text, delta)

    def _show_text(self, text: str, delta: AnswerDelta) -> None:
        self._is_at_start = self._is_at_start and not text.strip()
        delta.text += self._text.feed(self._stops.feed(self._text.strip_after_mark(text)))
        if self._stops.matched is not None:
            delta.text += self._text.flush()

    def _opens_bare_calls(self, text: str) -> bool:
        """Open a section of calls if the answer may begin with one that has no mark."""
        make = self._format.calls.make_bare_reader if self._format.calls is not None else None
        if not self._is_at_start or make is None or self._tools is None:
            return False
        if text.lstrip()[:1] not in ("{", "["):
            return False
        self._is_bare = True
        self._open_calls("", make(self._tools))
        return True

    def _read_mark(self, mark: str, delta: AnswerDelta) -> None:
        thought, calls = self._format.thought, self._format.calls
        is_thought = thought is not None and mark == thought.start
        if self._section is Section.CALLS:
            assert self._call_reader is not None, "a section of calls has one"
            if self._call_reader.is_in_value:
                self._read_calls(mark, delta)
            else:
                self._close_calls(mark, delta)
        elif is_thought and not self._is_at_start:
            self._show_text(mark, delta)  # an answer about thoughts
        else:
            line_ends = self._end_section(delta)
            if is_thought:
                self._section = Section.THOUGHT
            elif calls is not None and mark in calls.starts:
                is_inner = mark in calls.inner_starts
                start = line_ends if is_inner else line_ends + mark
                self._open_calls(start, calls.make_reader(self._tools))
                if is_inner:
                    self._read_calls(mark, delta)
            else:
                self._section, self._is_at_start = Section.TEXT, True

    def _end_section(self, delta: AnswerDelta) -> str:
        """Show the text held back before a mark; return the line ends that are dropped."""
        self._thought.meet_mark()
        if self._section is not Section.TEXT:
            return ""
        delta.text += self._text.feed(self._stops.flush())
        line_ends = self._text.held
        self._text.meet_mark()
        return line_ends

    def _open_calls(self, start: str, reader: CallReader) -> None:
        self._section, self._call_reader = Section.CALLS, reader
        self._start, self._raw = start, ""
        reader.is_enforced, reader.names = self._must_call, self._names

    def _read_calls(self, text: str, delta: AnswerDelta) -> None:
        assert self._call_reader is not None, "a section of calls has one"
        self._raw += text
        self._collector.collect(self._call_reader.feed(text), delta)
        if self._is_bare and self._call_reader.has_failed:
            self._close_calls("", delta)

    def _close_calls(self, mark: str, delta: AnswerDelta) -> None:
        """End a section of calls; show as text what is not a complete call."""
        reader, calls = self._call_reader, self._format.calls
        assert reader is not None, "a section of calls has one"
        was_bare, self._is_bare = self._is_bare, False
        is_cut = not mark and not was_bare and calls is not None and bool(calls.end)
        self._collector.collect(reader.close(is_cut=is_cut), delta)
        self._call_reader, self._section = None, Section.TEXT
        self._is_at_start = not reader.has_failed
        if not reader.has_failed:
            self._text.meet_mark()
        elif was_bare and not reader.calls_count:
            self._unread = self._raw + self._unread
        else:
            self.broken_calls += 1
            markup = self._start + self._raw[reader.read_chars :] + mark
            delta.text += self._text.restore_mark(markup)
