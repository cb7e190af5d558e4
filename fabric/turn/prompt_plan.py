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

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from fabric.errors import HungUpError, RejectedError
from fabric.kvcache.arrangement import Move
from fabric.limits import BODY_BYTES_MAX
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import MatchKind


def prompt_bytes_max(tokens_max: int, token_reach_bytes: int | None) -> int:
    """Return the size of text that no prompt within the context reaches.

    At most that of a body, which contains the prompt.
    """
    if token_reach_bytes is None:
        return BODY_BYTES_MAX
    return min(BODY_BYTES_MAX, tokens_max * token_reach_bytes)


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Limit of one prompt's length, and whether its tokens are still wanted.

    A prompt of `tokens_max` tokens or more is refused: the answer needs one, too.
    """

    tokens_max: int
    token_reach_bytes: int | None  # of text that one token may stand for; None: any number
    is_unwanted: Callable[[], bool] = lambda: False
    passed_tokens: int = 0  # before the text that is encoded

    def behind(self, tokens_count: int) -> "PromptLimit":
        """Return the limit for what follows that many tokens."""
        return replace(self, passed_tokens=self.passed_tokens + tokens_count)

    def left(self, tokens_count: int) -> int:
        """Return how many more than `tokens_count` reach the limit."""
        return self.tokens_max - self.passed_tokens - tokens_count

    def check_bytes(self, size_bytes: int) -> None:
        """Raise RejectedError if no tokens within the limit can hold so much text."""
        reach_bytes = self.token_reach_bytes
        if reach_bytes is not None and size_bytes >= self.tokens_max * reach_bytes:
            self._refuse(f"is {size_bytes} bytes long")

    def check(self, tokens_count: int) -> None:
        """Raise RejectedError once that many tokens reach the limit, HungUpError if unwanted."""
        if self.is_unwanted():
            raise HungUpError
        if self.left(tokens_count) <= 0:
            self._refuse(f"has {self.passed_tokens + tokens_count} tokens or more")

    def _refuse(self, what: str) -> NoReturn:
        message = (
            f"this model's maximum context length is {self.tokens_max} tokens, but the prompt "
            f"{what}: shorten the conversation"
        )
        raise RejectedError(message, code="context_length_exceeded", param="messages")


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """Token counts of a prompt's parts; 0 for a part that does not exist or was not looked for."""

    head: int = 0  # all before the first message of the user: what conversations share
    asked: int = 0  # up to the end of the user's last message, if other messages follow it
    conversation: int = 0  # all but the opening of the answer
    opens_more: bool = False  # the opening is more than the role: a thought, say
    trims_answers: bool = False  # the template trims the end of earlier answers
    # Where other prompts differ, or may; found for each prompt, and in no record.
    branches: tuple[int, ...] = ()

    def with_branch(self, tokens_count: int) -> "PromptMarks":
        """Return the marks with one more branch."""
        return replace(self, branches=(*self.branches, tokens_count))

    def within(self, tokens_count: int) -> "PromptMarks":
        """Return the marks of a prompt cut to so many tokens."""
        return PromptMarks(
            min(self.head, tokens_count),
            min(self.asked, tokens_count),
            min(self.conversation, tokens_count),
        )


NO_MARKS = PromptMarks()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and, for each, where its text ends, in utf-8 bytes."""

    ids: list[int]
    ends: list[int]


class PromptTokenizer(Protocol):
    """Tokenizer as planning needs it."""

    @property
    def cut_texts(self) -> dict[int, bytes]:
        """Special tokens that always stand alone, with their text."""
        ...

    def encode(
        self, text: str, *, special_prefix: bool = False, limit: PromptLimit | None = None
    ) -> Encoded:
        """Encode with offsets; raise RejectedError if the text reaches the limit."""
        ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """Content of an agent's cache, as text and as tokens."""

    text: bytes
    ids: list[int]
    ends: list[int]
    prompt_tokens_count: int

    @property
    def prompt_bytes(self) -> bytes:
        """Text of the last prompt, without the answer that followed."""
        if not self.prompt_tokens_count:
            return b""
        return self.text[: self.ends[self.prompt_tokens_count - 1]]


EMPTY_TRANSCRIPT = Transcript(b"", [], [], 0)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The tokens to have in the cache, and how many of the record's leading ones serve."""

    text: bytes
    ids: list[int]
    ends: list[int]
    kept_tokens: int
    match: MatchKind
    reason: str
    taken_tokens: int = 0  # leading ids and ends that are the record's own
    note: str = ""  # changes of the messages, in words that follow the reason
    marks: PromptMarks = NO_MARKS
    moves: tuple[Move, ...] = ()  # of an edited record: where its tokens go, the kept ones first


def plan_prompt(
    tokenizer: PromptTokenizer,
    text: str,
    stored: Transcript,
    *,
    raw: bool,
    limit: PromptLimit | None = None,
) -> PromptPlan:
    """Plan how to continue `stored` with the prompt `text`; raise RejectedError over `limit`.

    `raw`: an untemplated prompt, which has no special tokens to cut at and gets the
    tokenizer's own prefix; it is always encoded whole.
    """
    prompt = text.encode()
    common = common_prefix(prompt, stored.text)
    ids, ends, taken = _encode_behind_cut(tokenizer, prompt, stored, common, raw=raw, limit=limit)
    if not ids:
        encoded = tokenizer.encode(text, special_prefix=raw, limit=limit)
        ids, ends = encoded.ids, encoded.ends
    return plan_tokens(prompt, Encoded(ids, ends), stored, taken)


def plan_tokens(
    prompt: bytes, encoded: Encoded, stored: Transcript, taken_tokens: int = 0
) -> PromptPlan:
    """Plan for a prompt whose tokens are known."""
    ids = encoded.ids
    kept = common_prefix(ids, stored.ids)
    match = _classify(len(ids), kept, len(stored.ids))
    reason = _reason(match, kept, stored)
    return PromptPlan(prompt, ids, encoded.ends, kept, match, reason, taken_tokens)


def _encode_behind_cut(
    tokenizer: PromptTokenizer,
    prompt: bytes,
    stored: Transcript,
    common: int,
    *,
    raw: bool,
    limit: PromptLimit | None,
) -> tuple[list[int], list[int], int]:
    """Encode from the last safe cut; return nothing if there is none or it proves unsafe."""
    cut = None if raw else _last_cut(tokenizer.cut_texts, prompt, stored, common)
    if cut is None:
        return [], [], 0
    index, start = cut
    behind = limit.behind(index) if limit is not None else None
    fresh = tokenizer.encode(prompt[start:].decode(), limit=behind)
    if not fresh.ids or fresh.ids[0] not in tokenizer.cut_texts:
        return [], [], 0
    ends = stored.ends[:index] + [start + end for end in fresh.ends]
    return stored.ids[:index] + fresh.ids, ends, index


def _last_cut(
    cut_texts: dict[int, bytes], prompt: bytes, stored: Transcript, common: int
) -> tuple[int, int] | None:
    """Find (token index, byte offset) of the last special token to start encoding at."""
    if common == len(stored.text) and stored.ids:
        # An answer cut short by a limit has no end token; the template may add one now.
        rest = prompt[common:]
        if any(rest.startswith(special) for special in cut_texts.values()):
            return len(stored.ids), common
    for index in range(bisect_right(stored.ends, common) - 1, 0, -1):
        special = cut_texts.get(stored.ids[index])
        if special is not None:
            start = stored.ends[index - 1]  # it may reach beyond its text, over white space
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
        return "the prompt is what is stored"
    if match is MatchKind.EXTEND:
        return "the prompt extends what is stored"
    if match is MatchKind.DIVERGE:
        at = stored.ends[kept - 1]
        return f"differs after token {kept} of {len(stored.ids)}, byte {at} of {len(stored.text)}"
    return "nothing stored begins like this prompt" if stored.ids else "nothing was stored"
