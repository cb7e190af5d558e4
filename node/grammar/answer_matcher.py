"""Matcher of one answer and its grammar: computes which tokens may come next.

A step's mask depends on the previous token, which is known while the model computes the step:
`take` starts the computation on another thread, and `mask` waits for it when logits are sampled.
"""

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from fabric.errors import RejectedError
from node.grammar.compiler import Grammar, Mask, compute_mask, refusal
from node.grammar.reasons import client_reason
from node.grammar.thought import Beginning, ThoughtEndDetector, ThoughtMarks
from node.limits import GRAMMAR_MASK_S, LINE_ENDS_AFTER_THOUGHT_MAX


class _Phase(Enum):
    FIRST = auto()  # before the first token: a thought may come
    THOUGHT = auto()
    QUOTE = auto()  # a call within a thought, which may also be all that comes
    TEXT = auto()  # follows a grammar
    FREE = auto()  # any text, until a call begins
    CALL = auto()  # a tool call, without a grammar
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class CallRule:
    """Grammar of tool calls in an answer that may also contain text."""

    ids: frozenset[int]  # tokens that begin a call
    grammar: Grammar | None = None  # grammar of all calls; None: any text


_PHASES = {
    Beginning.TEXT: _Phase.TEXT,
    Beginning.THOUGHT: _Phase.THOUGHT,
    Beginning.EITHER: _Phase.FIRST,
}


class AnswerMatcher:
    """Matcher of one answer; used by one thread at a time."""

    def __init__(
        self,
        grammar: Grammar | None,
        threads: Executor,
        marks: ThoughtMarks | None = None,
        beginning: Beginning = Beginning.TEXT,
        calls: CallRule | None = None,
        barred_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Match `grammar` after a thought, in which the tokens `barred_ids` are not allowed.

        Without a grammar, any other text is allowed except in calls.
        """
        followed = calls.grammar if grammar is None and calls is not None else grammar
        assert followed is not None, "there is a grammar to follow"
        self._vocabulary = followed.vocabulary
        self._threads = threads
        self._matcher = followed.begin()
        self._first: Mask | None = followed.first_mask  # mask until the format's first token
        self._start_id = marks.start_id if marks is not None else None
        self._thought = ThoughtEndDetector(marks) if marks is not None else None
        self._is_free = grammar is None
        self._thought_mask = self._vocabulary.without(barred_ids, may_end=self._is_free)
        self._barred_ids = barred_ids
        if calls is not None and marks is not None and marks.holds_calls:
            self._thought_mask = self._vocabulary.whole_mask
        self._calls = calls
        self._phase = _PHASES[beginning]
        if self._is_free and beginning is not Beginning.THOUGHT:
            self._phase = _Phase.FREE
        self._may_open_thought = beginning is Beginning.EITHER
        self._line_ends_left = 0  # line ends that may still follow a thought
        self._next_mask: Future[Mask] | None = None

    def replay(self, tokens: Iterable[int]) -> None:
        """Consume the tokens of an earlier answer; raise RejectedError if they do not fit."""
        for token in tokens:
            self._accept(token)

    @property
    def openings(self) -> tuple[int, ...]:
        """Return tokens that are allowed in addition to the mask; call `mask` first.

        They begin a thought or a call, or are line ends before these. Masks omit them, so that
        masking never makes one of them the likeliest token: only the model itself can choose it.
        """
        thoughts = (self._start_id,) if self._phase is _Phase.FIRST else ()
        is_open = self._first is not None and self._phase in {_Phase.FIRST, _Phase.TEXT}
        calls = sorted(self._call_ids) if is_open else ()
        ends = self._vocabulary.line_ends if is_open else {}
        between = (token for token, count in ends.items() if count <= self._line_ends_left)
        return tuple(token for token in (*thoughts, *calls, *between) if token is not None)

    @property
    def _call_ids(self) -> frozenset[int]:
        return self._calls.ids if self._calls is not None else frozenset()

    def take(self, token: int) -> None:
        """Consume the next token on another thread, and compute the mask that follows."""
        self._next_mask = self._threads.submit(self._advance, token)

    def mask(self) -> Mask:
        """Return the mask of the next token; raise RejectedError if it takes too long."""
        if self._next_mask is None:
            return self._allowed_mask()
        try:
            return self._next_mask.result(GRAMMAR_MASK_S)
        except NotYetError:
            message = f"the output format took more than {GRAMMAR_MASK_S:g} s for one token"
            raise RejectedError(message, code="format_too_complex") from None

    def _advance(self, token: int) -> Mask:
        self._accept(token)
        return self._allowed_mask()

    def _accept(self, token: int) -> None:
        if self._phase is _Phase.FIRST:
            opens = token == self._start_id
            self._phase = _Phase.THOUGHT if opens else _Phase.TEXT
            if opens:
                return
        opens = self._may_open_thought and token == self._start_id
        self._may_open_thought = False
        is_first = self._phase is _Phase.TEXT and self._first is not None
        if self._phase is _Phase.FREE and opens:
            self._phase = _Phase.THOUGHT
        elif self._phase is _Phase.THOUGHT and token in self._call_ids:
            self._quote(token)
        elif token in self._call_ids and (is_first or self._phase is _Phase.FREE):
            self._begin_call(token)
        elif token in self._vocabulary.end_ids:
            self._phase = _Phase.ENDED
        elif self._phase in {_Phase.THOUGHT, _Phase.QUOTE}:
            assert self._thought is not None, "only models with thought marks think"
            if self._thought.push(self._vocabulary.tokens.decode_bytes([token])):
                self._phase = _Phase.FREE if self._is_free else _Phase.TEXT
                self._line_ends_left = LINE_ENDS_AFTER_THOUGHT_MAX
        elif self._phase is _Phase.TEXT:
            if self._is_line_end(token):
                self._line_ends_left -= self._vocabulary.line_ends[token]
            else:
                self._consume(token)

    def _quote(self, token: int) -> None:
        """Begin a call within a thought: free, and the thought may continue after it."""
        if token in self._barred_ids:
            reason = "a thought cannot have a token that begins a call"
            raise refusal(reason)
        self._phase = _Phase.QUOTE

    def _begin_call(self, token: int) -> None:
        """Switch to the grammar of calls for the rest of the answer."""
        grammar = self._calls.grammar if self._calls is not None else None
        self._calls = None
        if grammar is None:
            self._phase = _Phase.CALL
            return
        self._phase, self._matcher = _Phase.TEXT, grammar.begin()
        self._consume(token)

    def _consume(self, token: int) -> None:
        self._first = None
        if not self._matcher.consume_token(token):
            raise refusal(client_reason(self._matcher.get_error()))

    def _is_line_end(self, token: int) -> bool:
        """Return whether a token is a line end before the constrained text."""
        if self._first is None or token not in self._vocabulary.line_ends:
            return False
        is_in_format = bool(self._first[token // 32] >> np.uint32(token % 32) & 1)
        return not is_in_format and self._vocabulary.line_ends[token] <= self._line_ends_left

    def _allowed_mask(self) -> Mask:
        match self._phase:
            case _Phase.THOUGHT:
                return self._thought_mask
            case _Phase.CALL | _Phase.FREE | _Phase.QUOTE:
                return self._vocabulary.whole_mask
            case _Phase.ENDED:
                return self._vocabulary.ends_mask
        return compute_mask(self._matcher) if self._first is None else self._first
