"""Reader of answers that have marks around their thoughts and calls."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from node.dialect.answer_delta import AnswerDelta, CallCollector
from node.dialect.call_reader import CallEvent, CallReader
from node.dialect.formats import AnswerFormat, ThoughtStage
from node.dialect.text_filters import LineEndFilter, StopStrings, compile_marks


class Section(StrEnum):
    """Kinds of an answer's parts."""

    TEXT = "text"
    THOUGHT = "thought"
    QUOTE = "quote"  # within a thought, from the mark of a call on
    CALLS = "calls"


@dataclass(slots=True)
class _Quote:
    """Calls within a thought: quoted, unless the answer ends before the thought does."""

    reader: CallReader
    text: str = ""
    events: list[CallEvent] = field(default_factory=list)
    is_closed: bool = False  # the last mark was the end of a section


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
        self._takes_one = choice.takes_one
        self._tools = tools
        self._stop = stop
        self._call_seed = call_seed
        self._reset()

    def _reset(self) -> None:
        self._section = Section.TEXT
        self._is_at_start = True  # no text since the last mark
        self._text = LineEndFilter(has_marks=bool(self._marks()))
        self._thought = LineEndFilter(has_marks=True)
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._unread = ""  # may begin a mark
        self._quote: _Quote | None = None
        self._call_reader: CallReader | None = None
        self._start = ""  # text of the mark that opened the section of calls
        self._raw = ""  # text within it
        self._is_bare = False  # the section of calls has no marks
        self._collector = CallCollector(self._call_seed, takes_one=self._takes_one)
        self._stops = StopStrings(self._stop)
        self.broken_calls = 0
        self.has_cut_call = False

    @property
    def has_calls(self) -> bool:
        return self._collector.ended_count > 0

    @property
    def stage(self) -> ThoughtStage:
        if self._section is Section.THOUGHT:
            return ThoughtStage.THOUGHT
        if self._section is Section.QUOTE:
            return ThoughtStage.CALL
        may_open = self._format.thought is not None and self._is_at_start
        is_open = may_open and self._section is Section.TEXT
        return ThoughtStage.OPEN if is_open else ThoughtStage.ELSEWHERE

    def begin(self, begun: str) -> None:
        """Start an answer that the prompt has begun; discard any earlier one.

        A call within `begun` counts as text, and so does the model's continuation of it.
        """
        self._reset()
        self._stops = StopStrings(())
        self.feed(begun)
        if self._section is Section.CALLS:
            self._section, self._is_at_start = Section.TEXT, False
        elif self._section is Section.QUOTE:
            self._section = Section.THOUGHT
        self._forget_parts()
        self._text.reset()
        self._thought.reset()

    def feed(self, text: str) -> AnswerDelta:
        delta = AnswerDelta()
        self._unread += text
        self._run(delta)
        delta.stopped_by = self._stops.matched
        return delta

    def finish(self, *, is_cut: bool = False) -> AnswerDelta:
        delta = AnswerDelta()
        if self._unread:
            rest, self._unread = self._unread, ""
            self._read_text(rest, delta)
        if self._quote is not None:
            self._end_in_quote(self._quote, delta, is_cut=is_cut)
        if self._call_reader is not None:
            self._close_calls("", delta, is_cut=is_cut)
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
            case Section.QUOTE:
                assert thought is not None, "it is within a thought"
                end = (calls.end,) if calls is not None and calls.end else ()
                return (thought.end, *starts, *end)
            case Section.TEXT:
                thoughts = (thought.start, thought.end) if thought is not None else ()
                marks = (*thoughts, *starts, *self._format.hidden_marks)
                return tuple(dict.fromkeys(marks))

    def _read_text(self, text: str, delta: AnswerDelta) -> None:
        if self._quote is not None and self._quote.is_closed and text.strip():
            self._end_quote(self._quote, delta)
        if self._quote is not None:
            self._quote.text += text
            self._quote.events += self._quote.reader.feed(text)
        elif self._section is Section.THOUGHT:
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
        is_end = thought is not None and mark == thought.end
        if self._section is Section.CALLS:
            assert self._call_reader is not None, "a section of calls has one"
            if self._call_reader.is_in_value:
                self._read_calls(mark, delta)
            else:
                self._close_calls(mark, delta)
        elif self._section is Section.QUOTE and not is_end:
            self._read_quoted(mark, delta)
        elif self._section is Section.TEXT and (is_thought or is_end) and not self._is_at_start:
            self._show_text(mark, delta)  # an answer about thoughts
        elif self._section is Section.THOUGHT and not is_end:
            self._open_quote(mark)
        else:
            if self._quote is not None:
                self._end_quote(self._quote, delta)
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

    def _open_quote(self, mark: str) -> None:
        self._section = Section.QUOTE
        self._quote = _Quote(self._quoted_reader())
        self._add_quoted_start(self._quote, mark)

    def _quoted_reader(self) -> CallReader:
        assert self._format.calls is not None, "its mark was read"
        reader = self._format.calls.make_reader(self._tools)
        reader.names = self._names
        return reader

    def _add_quoted_start(self, quote: _Quote, mark: str) -> None:
        assert self._format.calls is not None, "its mark was read"
        quote.text += mark
        quote.is_closed = False
        if mark in self._format.calls.inner_starts:
            quote.events += quote.reader.feed(mark)

    def _read_quoted(self, mark: str, delta: AnswerDelta) -> None:
        """Read a mark of calls within a thought."""
        quote, calls = self._quote, self._format.calls
        assert quote is not None, "a section of quoted calls has one"
        assert calls is not None, "its mark was read"
        if quote.reader.is_in_value or (mark in calls.starts and not quote.is_closed):
            quote.text += mark
            quote.events += quote.reader.feed(mark)
        elif mark in calls.starts:
            quote.reader = self._quoted_reader()
            self._add_quoted_start(quote, mark)
        else:
            quote.text += mark
            quote.events += quote.reader.close(is_cut=False)
            quote.is_closed = True
            if quote.reader.has_failed:
                self._end_quote(quote, delta)

    def _end_quote(self, quote: _Quote, delta: AnswerDelta) -> None:
        """Show quoted calls as a part of the thought, which continues."""
        self._section, self._quote = Section.THOUGHT, None
        delta.reasoning += self._thought.feed(self._thought.strip_after_mark(quote.text))

    def _end_in_quote(self, quote: _Quote, delta: AnswerDelta, *, is_cut: bool) -> None:
        """End an answer within a thought; its calls count if it ended itself after whole ones."""
        calls = self._format.calls
        if not quote.is_closed:
            quote.events += quote.reader.close(is_cut=calls is not None and bool(calls.end))
        if is_cut or quote.reader.has_failed:
            self._end_quote(quote, delta)
            return
        self._quote = None
        self._thought.meet_mark()
        self._collector.collect(quote.events, delta)

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

    def _close_calls(self, mark: str, delta: AnswerDelta, *, is_cut: bool = False) -> None:
        """End a section of calls.

        A begun call stays a call, as its beginning has been streamed. Anything else is text,
        unless the answer `is_cut` before a call's name.
        """
        reader, calls = self._call_reader, self._format.calls
        assert reader is not None, "a section of calls has one"
        was_bare, self._is_bare = self._is_bare, False
        lacks_end = not mark and not was_bare and calls is not None and bool(calls.end)
        is_unfinished = not reader.has_failed
        self._collector.collect(reader.close(is_cut=lacks_end), delta)
        self._call_reader, self._section = None, Section.TEXT
        self._is_at_start = not reader.has_failed
        has_bare_calls = calls is not None and calls.make_bare_reader is not None
        if mark and has_bare_calls and not self._raw.strip():  # Llama 4 writes marks, then a call
            self._is_at_start = True
            reader.has_failed = False
        if not reader.has_failed:
            self._text.meet_mark()
            return
        has_begun = self._collector.break_off(delta)
        if was_bare and not has_begun and not reader.calls_count:
            self._unread = self._raw + self._unread
            return
        self.broken_calls += 1
        self.has_cut_call = is_cut and has_begun
        if was_bare and not is_unfinished:
            self._unread = reader.unread + self._unread
        if has_begun or (is_cut and is_unfinished):
            self._text.meet_mark()
        else:
            markup = self._start + self._raw[reader.read_chars :] + mark
            delta.text += self._text.restore_mark(markup)
