"""Follow one answer through its grammar: which tokens may come next, computed beside the model.

A step's mask follows from the token before it, which is known while the model computes the step:
`take` begins to compute it on another thread, and `mask` waits for it where logits are sampled.
"""

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from fabric.errors import RejectedError
from node.grammar.compiler import Grammar, Mask, compute_mask, refusal
from node.grammar.thought import Beginning, ThoughtEnd, ThoughtMarks
from node.limits import GRAMMAR_MASK_S, LINE_ENDS_BEHIND_THOUGHT_MAX


class _Phase(Enum):
    FIRST = auto()  # nothing is said: a thought may come
    THOUGHT = auto()
    TEXT = auto()  # as a grammar has it
    FREE = auto()  # until a call begins
    CALL = auto()  # of a tool, instead of the format
    OVER = auto()


@dataclass(frozen=True, slots=True)
class CallRule:
    """What there is to say of the tools' calls where the answer is something else."""

    ids: frozenset[int]  # tokens that begin one by themselves
    grammar: Grammar | None = None  # of all of them; None: as the model likes


_PHASES = {
    Beginning.TEXT: _Phase.TEXT,
    Beginning.THOUGHT: _Phase.THOUGHT,
    Beginning.EITHER: _Phase.FIRST,
}


class AnswerMatcher:
    """Follows one answer through its grammar; used by one thread at a time."""

    def __init__(
        self,
        grammar: Grammar | None,
        threads: Executor,
        marks: ThoughtMarks | None = None,
        beginning: Beginning = Beginning.TEXT,
        calls: CallRule | None = None,
        unthought: frozenset[int] = frozenset(),
    ) -> None:
        """Follow `grammar` behind a thought, which has none of the tokens `unthought`.

        Without a grammar the answer is free, but for its calls.
        """
        followed = calls.grammar if grammar is None and calls is not None else grammar
        assert followed is not None, "there is something to follow"
        self._vocabulary = followed.vocabulary
        self._threads = threads
        self._matcher = followed.begin()
        self._first: Mask | None = followed.first_mask  # nothing of the format is said yet
        self._start_id = marks.start_id if marks is not None else None
        self._thought = ThoughtEnd(marks) if marks is not None else None
        self._thought_mask = self._vocabulary.without(unthought)
        if calls is not None and marks is not None and marks.holds_calls:
            self._thought_mask = self._vocabulary.whole_mask
        self._calls = calls
        self._phase = _PHASES[beginning] if grammar is not None else _Phase.FREE
        self._line_ends_left = 0  # that may come between a thought and what follows it
        self._coming: Future[Mask] | None = None

    def replay(self, tokens: Iterable[int]) -> None:
        """Take what was answered before; raise RejectedError if it does not fit."""
        for token in tokens:
            self._accept(token)

    @property
    def openings(self) -> tuple[int, ...]:
        """Return the tokens that begin a thought or a call, or come between these, if they may.

        Only of the model's own accord: they are in no mask, as they could become the likeliest of
        those. Ask for the mask first.
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
        """Take the next token, and begin to compute what may follow it."""
        self._coming = self._threads.submit(self._advance, token)

    def mask(self) -> Mask:
        """Wait for and return what may come next; raise RejectedError if that takes too long."""
        if self._coming is None:
            return self._allowed()
        try:
            return self._coming.result(GRAMMAR_MASK_S)
        except NotYetError:
            message = f"the output format took more than {GRAMMAR_MASK_S:g} s for one token"
            raise RejectedError(message, code="format_too_complex") from None

    def _advance(self, token: int) -> Mask:
        self._accept(token)
        return self._allowed()

    def _accept(self, token: int) -> None:
        if self._phase is _Phase.FIRST:
            opens = token == self._start_id
            self._phase = _Phase.THOUGHT if opens else _Phase.TEXT
            if opens:
                return
        is_unsaid = self._phase is _Phase.TEXT and self._first is not None
        if token in self._call_ids and (is_unsaid or self._phase in {_Phase.THOUGHT, _Phase.FREE}):
            self._begin_call(token)
        elif self._phase is _Phase.THOUGHT:
            assert self._thought is not None, "only models with marks think"
            if self._thought.push(self._vocabulary.tokens.decode_bytes([token])):
                self._phase, self._line_ends_left = _Phase.TEXT, LINE_ENDS_BEHIND_THOUGHT_MAX
        elif token in self._vocabulary.end_ids:
            self._phase = _Phase.OVER
        elif self._phase is _Phase.TEXT:
            if self._is_between(token):
                self._line_ends_left -= self._vocabulary.line_ends[token]
            else:
                self._consume(token)

    def _begin_call(self, token: int) -> None:
        """Go on with calls, and nothing else."""
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
            raise refusal(self._matcher.get_error())

    def _is_between(self, token: int) -> bool:
        """Say whether a token is a line end in front of the format, and not the format's own."""
        if self._first is None or token not in self._vocabulary.line_ends:
            return False
        is_formats = bool(self._first[token // 32] >> np.uint32(token % 32) & 1)
        return not is_formats and self._vocabulary.line_ends[token] <= self._line_ends_left

    def _allowed(self) -> Mask:
        match self._phase:
            case _Phase.THOUGHT:
                return self._thought_mask
            case _Phase.CALL | _Phase.FREE:
                return self._vocabulary.whole_mask
            case _Phase.OVER:
                return self._vocabulary.ends_mask
        return compute_mask(self._matcher) if self._first is None else self._first
