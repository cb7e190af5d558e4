"""Read an answer that has marks around its thoughts and calls, as it comes."""

from typing import Any, Protocol

from fabric.turn.call_choice import ANY_CALLS, CallChoice
from node.dialect.call_body import CallBody
from node.dialect.call_log import CallLog
from node.dialect.family import Family, Section
from node.dialect.marks import marks_of
from node.dialect.said import Said
from node.dialect.shown import Shown
from node.dialect.stop_strings import StopStrings


class Reader(Protocol):
    """Turns text into what is shown; two that are fed alike show alike, however it is cut."""

    broken_calls: int

    @property
    def has_calls(self) -> bool: ...

    def begin(self, tail: str) -> None:
        """Take the prompt's end, from where the model's own message begins."""
        ...

    def feed(self, text: str) -> Shown: ...

    def finish(self) -> Shown:
        """Show what was held back: the answer ends here."""
        ...


class MarkedReader:
    """Reads what a family of `Family` writes; calls only where there are tools."""

    def __init__(
        self,
        family: Family,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        call_seed: str,
        choice: CallChoice = ANY_CALLS,
    ) -> None:
        """Read calls as they were chosen: where some must come, a thought has none."""
        self._family = family
        self._must_call = choice.must_call
        self._names = frozenset(choice.names) or None
        self._tools = tools
        self._section = Section.TEXT
        self._left = ""  # may be the beginning of a mark
        has_marks = bool(family.marks(Section.TEXT, reads_calls=tools is not None))
        self._said, self._thought = Said(has_marks=has_marks), Said(has_marks=True)
        self._stops = StopStrings(stop)
        self._log = CallLog(call_seed, takes_one=choice.takes_one)
        self._body: CallBody | None = None
        self._start = ""  # the section of calls: what is in front of it
        self._raw = ""  # and in it
        self._is_bare = False  # without a mark
        self._is_at_start = True  # nothing was said since the last mark
        self.broken_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._log.ended_count > 0

    def begin(self, tail: str) -> None:
        self.feed(tail)
        self._left = ""
        self._said.begin_again()
        self._thought.begin_again()
        self._stops.begin_again()

    def feed(self, text: str) -> Shown:
        shown = Shown()
        self._left += text
        self._run(shown)
        shown.stopped_by = self._stops.found
        return shown

    def finish(self) -> Shown:
        shown = Shown()
        if self._left:
            left, self._left = self._left, ""
            self._take(left, shown)
        if self._body is not None:
            self._close_calls("", shown)
            self._run(shown)
            self._take(self._left, shown)
        shown.reasoning += self._thought.finish()
        shown.text += self._said.take(self._stops.finish()) + self._said.finish()
        return shown

    def _run(self, shown: Shown) -> None:
        while self._left and self._stops.found is None:
            reads_calls = self._tools is not None
            if self._must_call and self._section is Section.THOUGHT:
                reads_calls = False
            marks = self._family.marks(self._section, reads_calls=reads_calls)
            text, mark, self._left = marks_of(() if self._is_bare else marks).split(self._left)
            if text:
                self._take(text, shown)
            if mark is not None:
                self._cross(mark, shown)
            elif not text:
                break

    def _take(self, text: str, shown: Shown) -> None:
        if self._section is Section.THOUGHT:
            shown.reasoning += self._thought.take(self._thought.begin(text))
        elif self._section is Section.CALLS or self._may_be_bare(text):
            self._read_calls(text, shown)
        else:
            self._say(text, shown)

    def _say(self, text: str, shown: Shown) -> None:
        self._is_at_start = self._is_at_start and not text.strip()
        shown.text += self._said.take(self._stops.take(self._said.begin(text)))
        if self._stops.found is not None:
            shown.text += self._said.finish()

    def _may_be_bare(self, text: str) -> bool:
        """Open a section of calls where an answer may begin with one that has no mark."""
        calls = self._family.calls
        if not self._is_at_start or calls is None or calls.bare is None or self._tools is None:
            return False
        if text.lstrip()[:1] not in ("{", "["):
            return False
        self._is_bare = True
        self._open_calls("", calls.bare(self._tools))
        return True

    def _cross(self, mark: str, shown: Shown) -> None:
        family = self._family
        is_thought = family.thought is not None and mark == family.thought.start
        if self._section is Section.CALLS:
            assert self._body is not None, "a section of calls has one"
            if self._body.is_in_value:
                self._read_calls(mark, shown)
            else:
                self._close_calls(mark, shown)
        elif is_thought and not self._is_at_start:
            self._say(mark, shown)  # an answer about thoughts
        else:
            before = self._meet_mark(shown)
            if is_thought:
                self._section = Section.THOUGHT
            elif family.calls is not None and mark in family.calls.starts:
                self._begin_calls(before, mark, shown)
            else:
                self._section, self._is_at_start = Section.TEXT, True

    def _meet_mark(self, shown: Shown) -> str:
        """Say what was held back; return the line ends that are not said."""
        self._thought.meet_mark()
        if self._section is not Section.TEXT:
            return ""
        shown.text += self._said.take(self._stops.finish())
        dropped = self._said.held
        self._said.meet_mark()
        return dropped

    def _begin_calls(self, before: str, mark: str, shown: Shown) -> None:
        calls = self._family.calls
        assert calls is not None, "its mark was met"
        is_inner = mark in calls.inner_starts
        self._open_calls(before if is_inner else before + mark, calls.make(self._tools))
        if is_inner:
            self._read_calls(mark, shown)

    def _open_calls(self, start: str, body: CallBody) -> None:
        self._section, self._body, self._start, self._raw = Section.CALLS, body, start, ""
        body.is_enforced, body.names = self._must_call, self._names

    def _read_calls(self, text: str, shown: Shown) -> None:
        assert self._body is not None, "a section of calls has one"
        self._raw += text
        self._log.show(self._body.feed(text), shown)
        if self._is_bare and self._body.has_failed:
            self._close_calls("", shown)

    def _close_calls(self, mark: str, shown: Shown) -> None:
        """End a section; what is no complete call is shown as it was written."""
        body = self._body
        assert body is not None, "a section of calls has one"
        was_bare, self._is_bare = self._is_bare, False
        calls = self._family.calls
        is_cut = not mark and not was_bare and calls is not None and bool(calls.end)
        self._log.show(body.close(is_cut=is_cut), shown)
        self._body, self._section = None, Section.TEXT
        if not body.has_failed:
            self._said.meet_mark()
            self._is_at_start = True
        elif was_bare and not body.calls_count:
            self._is_at_start = False
            self._left = self._raw + self._left
        else:
            self.broken_calls += 1
            self._is_at_start = False
            shown.text += self._said.miss_mark(self._start + self._raw[body.read_chars :] + mark)
