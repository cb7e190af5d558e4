"""Compiler of grammars for one tokenizer; thread-safe, and it releases the GIL.

Reading the tokens' bytes takes a second or two for a large vocabulary, so it happens once, when the
first grammar is needed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fabric.errors import RejectedError
from fabric.limits import SCHEMA_PROPERTIES_MAX
from fabric.turn.answer_constraints import PARAM, OutputFormat, OutputKind
from node.grammar.expression import Expression
from node.grammar.format_grammar import format_grammar
from node.grammar.lark import lark_grammar, write_lark
from node.grammar.reasons import client_reason, without_place
from node.limits import FORMAT_REASON_CHARS_MAX, LINE_ENDS_AFTER_THOUGHT_MAX

Mask = NDArray[np.uint32]  # one bit for each token id, the lowest first
_LINE_ENDS = range(1, LINE_ENDS_AFTER_THOUGHT_MAX + 1)
_ROW_ITEMS: Final = 8 * SCHEMA_PROPERTIES_MAX  # each optional property takes four


class TokenMatcher(Protocol):
    """Methods of the library's matcher that we use."""

    def deep_copy(self) -> "TokenMatcher": ...
    def consume_token(self, sampled_token: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class TokenTexts(Protocol):
    """Methods of the library's tokenizer that we use."""

    vocab_size: int

    def decode_bytes(self, tokens: list[int]) -> bytes: ...
    def tokenize_bytes(self, utf8bytes: bytes) -> list[int]: ...
    def is_special_token(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a tokenizer that a compiler needs."""

    definition: str  # the content of tokenizer.json
    vocabulary_size: int  # ids that have a logit
    end_ids: frozenset[int]
    added_ids: Mapping[str, int]  # ids of added tokens by their text


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Tokenizer of the compiler, and the masks that need no grammar."""

    tokens: TokenTexts
    end_ids: frozenset[int]
    special_ids: Mapping[str, int]  # ids of special tokens by their text
    ends_mask: Mask
    others_mask: Mask
    whole_mask: Mask
    line_ends: Mapping[int, int]  # count of line ends in each token that has nothing else

    def without(self, tokens: Iterable[int], *, may_end: bool = False) -> Mask:
        """Return a mask of all but these and, unless the answer `may_end`, the end tokens."""
        mask = self.whole_mask if may_end else self.others_mask
        for token in tokens:
            mask = mask & ~bit(token, len(mask))
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """Compiled grammar; its own matcher never consumes a token."""

    vocabulary: Vocabulary
    first_mask: Mask
    _matcher: TokenMatcher

    def begin(self) -> TokenMatcher:
        """Return a matcher for one answer."""
        return self._matcher.deep_copy()


class Compiler:
    """Compiler for one model's tokenizer."""

    def __init__(self, facts: Callable[[], TokenizerFacts]) -> None:
        self._facts = facts
        self._reading = Lock()
        self._vocabulary: Vocabulary | None = None

    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer's vocabulary; raise RejectedError if it cannot be read."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _read(self._facts())
            return self._vocabulary

    def compile(self, output: OutputFormat) -> Grammar:
        """Compile an output format; raise RejectedError with the reason if it is invalid."""
        output.check()
        vocabulary = self.vocabulary()
        try:
            grammar = format_grammar(output, vocabulary.special_ids)
        except (TypeError, ValueError, AssertionError) as error:
            raise refusal(client_reason(str(error))) from None
        if output.kind is OutputKind.GRAMMAR:
            return _compile_grammar(vocabulary, grammar)
        try:
            return _compile_grammar(vocabulary, grammar)
        except RejectedError as error:  # its place is in our grammar, not in the client's format
            raise refusal(without_place(reason_of(error))) from None

    def compile_expression(self, expression: Expression) -> Grammar:
        """Compile an expression; raise RejectedError with the reason if it is invalid."""
        vocabulary = self.vocabulary()
        try:
            lark = write_lark(expression, vocabulary.special_ids)
        except ValueError as error:
            raise refusal(str(error)) from None
        return _compile_grammar(vocabulary, lark_grammar(lark))


def _compile_grammar(vocabulary: Vocabulary, grammar: str) -> Grammar:
    matcher = _matcher(vocabulary.tokens, grammar)
    first = compute_mask(matcher)
    _try_step(matcher.deep_copy(), first & vocabulary.others_mask)
    return Grammar(vocabulary, first, matcher)


def compute_mask(matcher: TokenMatcher) -> Mask:
    """Return the tokens that may come next; raise RejectedError if there are none."""
    if matcher.is_error():
        raise refusal(client_reason(matcher.get_error()))
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error():
        raise refusal(client_reason(matcher.get_error()))
    if not mask.any():
        reason = "no text fits it"
        raise refusal(reason)
    return mask


def _try_step(matcher: TokenMatcher, mask: Mask) -> None:
    """Consume one token, because only a step shows a grammar's cost in time and memory."""
    words = np.flatnonzero(mask)
    if not words.size:  # the answer may only be empty
        return
    word = int(words[0])
    lowest = int(mask[word])
    matcher.consume_token(32 * word + (lowest & -lowest).bit_length() - 1)
    compute_mask(matcher)


def refusal(reason: str) -> RejectedError:
    """Return the error for a format that cannot be enforced, for a reason in our words."""
    short = " ".join(reason.split())[:FORMAT_REASON_CHARS_MAX]
    message = f"the output format cannot be enforced: {short}"
    return RejectedError(message, code="invalid_format", param=PARAM)


def reason_of(error: RejectedError) -> str:
    """Return the reason in an error of `refusal`."""
    return error.message.partition(": ")[2]


def _read(facts: TokenizerFacts) -> Vocabulary:
    try:
        tokens = _tokens(facts)
    except ValueError as error:
        reason = f"this model's tokenizer is not supported ({error})"
        raise refusal(reason) from None
    words = tokens.vocab_size // 32 + 1  # as in the compiler's masks
    ends = np.zeros(words, np.uint32)
    for token in facts.end_ids:
        ends |= bit(token, words)
    encoded = {count: tokens.tokenize_bytes(b"\n" * count) for count in _LINE_ENDS}
    line_ends = {ids[0]: count for count, ids in encoded.items() if len(ids) == 1}
    masks = (ends, ~ends, ends | ~ends)
    special = {text: token for text, token in facts.added_ids.items() if _is_special(tokens, token)}
    return Vocabulary(tokens, facts.end_ids, special, *masks, line_ends)


def _is_special(tokens: TokenTexts, token: int) -> bool:
    return token < tokens.vocab_size and tokens.is_special_token(token)


def _matcher(tokens: Any, grammar: str) -> TokenMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        verbose_errors=False,  # they would contain text of the answer
    )
    matcher: TokenMatcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    return matcher


def _tokens(facts: TokenizerFacts) -> TokenTexts:
    from llguidance import LLTokenizer

    definition, end_ids = facts.definition, sorted(facts.end_ids)
    tokens: TokenTexts = LLTokenizer(definition, eos_token=end_ids)
    if tokens.vocab_size < facts.vocabulary_size:
        tokens = LLTokenizer(definition, n_vocab=facts.vocabulary_size, eos_token=end_ids)
    return tokens


def mask_of(tokens: Iterable[int], words: int) -> Mask:
    """Return a mask of this many words that allows only these tokens."""
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask |= bit(token, words)
    return mask


def full_mask(size: int) -> Mask:
    """Return a mask that allows all `size` tokens."""
    return ~np.zeros(size // 32 + 1, np.uint32)


def only_token(mask: Mask) -> int | None:
    """Return the one token that a mask allows; None if it allows others, too."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


def bit(token: int, words: int) -> Mask:
    """Return a mask of this many words that allows one token."""
    mask = np.zeros(words, np.uint32)
    mask[token // 32] = np.uint32(1) << np.uint32(token % 32)
    return mask
