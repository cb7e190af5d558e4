"""Match a prompt against an agent's record: text first, tokens second.

    stored text   |system ...|user ...|assistant ... <end>|
    prompt text   |system ...|user ...|assistant ... <end>|user ...|
                  common bytes ---------------------------^
                  cut: the last special token that starts within them

Tokens before the cut come from the record, so an answer keeps the tokens it was generated with.
The text after the cut is encoded afresh and compared with the record's remaining tokens.

`PromptMarks`: token counts where parts of the prompt end, since later prompts may differ there.

    |system, tools|user ...|assistant ...|tool ...|<answer begins> <thought opened>|
                 head   asked                 conversation                   whole prompt

The template's text after `conversation` opens the answer (the generation prompt). A later prompt
may open it differently or not at all; a template may drop a thought that it opened here.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from fabric.errors import HungUpError, RejectedError
from fabric.kvcache.arrangement import Move
from fabric.limits import BODY_BYTES_MAX
from fabric.turn.alignment import common_prefix
from fabric.turn.control_marks import ControlMarks
from fabric.turn.generation import MatchKind


def prompt_bytes_max(tokens_max: int, token_reach_bytes: int | None) -> int:
    """Return the size of text that is too long for the context, at most the size of a body."""
    if token_reach_bytes is None:
        return BODY_BYTES_MAX
    return min(BODY_BYTES_MAX, tokens_max * token_reach_bytes)


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Limit on one prompt's tokens, and a check whether its turn was cancelled.

    A prompt of `tokens_max` tokens or more is refused, because the answer needs at least one.
    """

    tokens_max: int
    token_reach_bytes: int | None  # longest text that one token may stand for; None: unbounded
    is_unwanted: Callable[[], bool] = lambda: False
    passed_tokens: int = 0  # tokens before the text to encode

    def after(self, tokens_count: int) -> "PromptLimit":
        """Return the limit for the text after that many tokens."""
        return replace(self, passed_tokens=self.passed_tokens + tokens_count)

    def left(self, tokens_count: int) -> int:
        """Return how many more tokens reach the limit after `tokens_count`."""
        return self.tokens_max - self.passed_tokens - tokens_count

    def check_bytes(self, size_bytes: int) -> None:
        """Raise RejectedError if a text of this size must exceed the limit."""
        reach_bytes = self.token_reach_bytes
        if reach_bytes is not None and size_bytes >= self.tokens_max * reach_bytes:
            self._refuse(f"is {size_bytes} bytes long")

    def check(self, tokens_count: int) -> None:
        """Raise RejectedError if that many tokens reach the limit, HungUpError if cancelled."""
        if self.is_unwanted():
            raise HungUpError
        if self.left(tokens_count) <= 0:
            self._refuse(f"has {self.passed_tokens + tokens_count} tokens or more")

    def _refuse(self, size: str) -> NoReturn:
        message = (
            f"this model's maximum context length is {self.tokens_max} tokens, but the prompt "
            f"{size}: shorten the conversation"
        )
        raise RejectedError(message, code="context_length_exceeded", param="messages")


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """Token counts at the ends of a prompt's parts; 0 for a part that is missing or unknown."""

    head: int = 0  # before the first user message: what conversations share
    question: int = 0  # end of the last user message, if other messages follow it
    conversation: int = 0  # before the opening of the answer
    opens_more: bool = False  # the opening contains more than the role, such as a thought
    trims_answers: bool = False  # the template trims the end of earlier answers
    # Where other prompts diverge or may diverge; found anew for each prompt, never recorded.
    branches: tuple[int, ...] = ()

    def with_branch(self, tokens_count: int) -> "PromptMarks":
        """Return the marks with one more branch."""
        return replace(self, branches=(*self.branches, tokens_count))

    def within(self, tokens_count: int) -> "PromptMarks":
        """Return the marks of the prompt's first `tokens_count` tokens."""
        return PromptMarks(
            min(self.head, tokens_count),
            min(self.question, tokens_count),
            min(self.conversation, tokens_count),
        )


NO_MARKS = PromptMarks()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and the UTF-8 offset at which each token's text ends."""

    ids: list[int]
    ends: list[int]


class PromptTokenizer(Protocol):
    """Interface of the tokenizer that planning needs."""

    @property
    def cut_texts(self) -> dict[int, bytes]:
        """Special tokens that are never merged with others, with their text."""
        ...

    @property
    def control_marks(self) -> ControlMarks:
        """Texts of the control tokens."""
        ...

    def encode(
        self,
        text: str,
        *,
        special_prefix: bool = False,
        limit: PromptLimit | None = None,
        plain: Sequence[int] = (),
    ) -> Encoded:
        """Encode with offsets; raise RejectedError if the text reaches the limit.

        `plain`: the bytes at which control marks begin that are plain text.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """Content of an agent's cache, as text and as tokens."""

    text: bytes
    ids: list[int]
    ends: list[int]


EMPTY_TRANSCRIPT = Transcript(b"", [], [])


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Tokens that the cache must hold for a prompt, and how many leading ones are stored."""

    text: bytes
    ids: list[int]
    ends: list[int]
    kept_tokens: int
    match: MatchKind
    reason: str
    taken_tokens: int = 0  # leading ids and ends copied from the record
    note: str = ""  # changes of the messages, shown after the reason
    marks: PromptMarks = NO_MARKS
    moves: tuple[Move, ...] = ()  # of an edited record's tokens; the first keeps the head


def plan_prompt(
    tokenizer: PromptTokenizer,
    text: str,
    stored: Transcript,
    *,
    raw: bool,
    limit: PromptLimit | None = None,
    plain: Sequence[int] = (),
) -> PromptPlan:
    """Plan how to continue `stored` with the prompt `text`; raise RejectedError over `limit`.

    `raw`: a prompt without a template. It has no special tokens to cut at, so it is encoded as a
    whole, with the tokenizer's prefix. `plain`: the bytes at which control marks begin that are
    plain text.
    """
    prompt = text.encode()
    common = common_prefix(prompt, stored.text)
    ids: list[int] = []
    ends: list[int] = []
    copied_count = 0
    if not raw:
        ids, ends, copied_count = _encode_after_cut(tokenizer, prompt, stored, common, plain, limit)
    if not ids:
        encoded = tokenizer.encode(text, special_prefix=raw, limit=limit, plain=plain)
        ids, ends = encoded.ids, encoded.ends
    return plan_tokens(prompt, Encoded(ids, ends), stored, copied_count)


def plan_tokens(
    prompt: bytes, encoded: Encoded, stored: Transcript, taken_tokens: int = 0
) -> PromptPlan:
    """Plan for a prompt whose tokens are known."""
    ids = encoded.ids
    kept = common_prefix(ids, stored.ids)
    match = _classify(len(ids), kept, len(stored.ids))
    reason = _reason(match, kept, stored)
    return PromptPlan(prompt, ids, encoded.ends, kept, match, reason, taken_tokens)


def _encode_after_cut(
    tokenizer: PromptTokenizer,
    prompt: bytes,
    stored: Transcript,
    common: int,
    plain: Sequence[int],
    limit: PromptLimit | None,
) -> tuple[list[int], list[int], int]:
    """Encode from the last safe cut; return no tokens if there is none or it proves unsafe."""
    tokens = stored.ids, stored.ends
    marks, plain_places = tokenizer.control_marks, frozenset(plain)
    common = marks.same_control_bytes(prompt, plain_places, stored.text, tokens, common)
    cut = _last_cut(tokenizer.cut_texts, prompt, stored, common)
    if cut is None:
        return [], [], 0
    index, start = cut
    rest_limit = limit.after(index) if limit is not None else None
    rest_plain = [at - start for at in plain[bisect_left(plain, start) :]]
    fresh = tokenizer.encode(prompt[start:].decode(), limit=rest_limit, plain=rest_plain)
    if not fresh.ids or fresh.ids[0] not in tokenizer.cut_texts:
        return [], [], 0
    ends = stored.ends[:index] + [start + end for end in fresh.ends]
    return stored.ids[:index] + fresh.ids, ends, index


def _last_cut(
    cut_texts: dict[int, bytes], prompt: bytes, stored: Transcript, common: int
) -> tuple[int, int] | None:
    """Find (token index, byte offset) of the last special token to start encoding at."""
    if common == len(stored.text) and stored.ids:
        # An answer that ended at a token limit has no end token; the template may add one now.
        rest = prompt[common:]
        if any(rest.startswith(special) for special in cut_texts.values()):
            return len(stored.ids), common
    for index in range(bisect_right(stored.ends, common) - 1, 0, -1):
        special = cut_texts.get(stored.ids[index])
        if special is not None:
            start = stored.ends[index - 1]  # a special token may also cover white space
            if prompt.startswith(special, start):
                return index, start
    return None


def _classify(prompt_tokens: int, kept: int, stored_tokens: int) -> MatchKind:
    if kept == 0:
        return MatchKind.NONE
    if kept == prompt_tokens:
        return MatchKind.EXACT
    return MatchKind.EXTEND if kept == stored_tokens else MatchKind.DIVERGE


def _reason(match: MatchKind, kept: int, stored: Transcript) -> str:
    if match is MatchKind.EXACT:
        return "the prompt equals the stored context"
    if match is MatchKind.EXTEND:
        return "the prompt extends the stored context"
    if match is MatchKind.DIVERGE:
        at = stored.ends[kept - 1]
        return f"differs after token {kept} of {len(stored.ids)}, byte {at} of {len(stored.text)}"
    return "no stored context begins like this prompt" if stored.ids else "nothing was stored"
