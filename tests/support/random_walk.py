"""Random answers that a grammar allows, from a small tokenizer with merges."""

import random
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from node.grammar.compiler import Compiler, TokenizerFacts

END = "<|im_end|>"
# Texts whose parts become tokens that cross the boundaries of a grammar's elements.
_TRAINED = [
    '{"name": "look", "arguments": {"at": "the sky", "n": {"a": 1}}}, {"name": "bash"}]',
    "<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>",
    '<invoke name="look">\n<parameter name="at">x</parameter>\n</invoke>\n</minimax:tool_call>',
    '</arg_value><arg_key>"]}}',
    "```tool_code\nlook(at='x', n=[1, 2])\n```",
]


class Walker:
    """Random walks through grammars; `specials` become tokens of their own."""

    def __init__(self, specials: tuple[str, ...] = ()) -> None:
        self.tokenizer = _tokenizer(specials)
        size = self.tokenizer.get_vocab_size()
        ids = {text: self.tokenizer.token_to_id(text) for text in (*specials, END)}
        self._end = ids[END]
        facts = TokenizerFacts(self.tokenizer.to_str(), size, frozenset({self._end}), ids)
        self.compiler = Compiler(lambda: facts)
        vocabulary = self.tokenizer.get_vocab()
        signs = {byte: sign for sign, byte in _bytes_by_sign().items()}
        self._bytes = {byte: vocabulary[signs[byte]] for byte in range(256)}
        self._lengths = {token: len(text) for text, token in vocabulary.items()}

    def walk(
        self, grammar: Any, rng: random.Random, hostile: tuple[str, ...] = (), tokens_max: int = 400
    ) -> str | None:
        """Return the text of random allowed tokens; None if they reach no end.

        Where allowed, write texts of `hostile` byte by byte.
        """
        matcher, ids, planned = grammar.begin(), [], []
        while len(ids) < tokens_max:
            allowed = self._allowed(matcher)
            if self._end in allowed and (len(allowed) == 1 or rng.random() < 0.4):
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            if hostile and not planned and rng.random() < 0.1:
                planned = [self._bytes[byte] for byte in rng.choice(hostile).encode()]
            token = planned.pop(0) if planned else None
            if token not in allowed:
                planned, token = [], self._choose(sorted(allowed - {self._end}), rng)
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return None

    def accepts(self, grammar: Any, text: str) -> bool:
        """Return whether the grammar accepts exactly this text."""
        matcher = grammar.begin()
        tokens = [self._bytes[byte] for byte in text.encode()]
        return all(map(matcher.consume_token, tokens)) and self._end in self._allowed(matcher)

    def _choose(self, allowed: list[int], rng: random.Random) -> int:
        """Choose any token or, as often, a long one."""
        if rng.random() < 0.5:
            return rng.choice(allowed)
        return max((rng.choice(allowed) for _ in range(4)), key=self._lengths.__getitem__)

    def _allowed(self, matcher: Any) -> set[int]:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        return set(map(int, np.flatnonzero(bits)))


@cache
def walker(*specials: str) -> Walker:
    """Return a cached walker."""
    return Walker(specials)


def _tokenizer(specials: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TRAINED * 50, trainer)
    # Many tokenizers mark none of these as special, yet encode each as one token.
    added = [AddedToken(text, special=index % 2 == 0) for index, text in enumerate(specials)]
    tokenizer.add_tokens(added)
    return tokenizer


def _bytes_by_sign() -> dict[str, int]:
    """Map each sign of a byte-level tokenizer to its byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    signs = {chr(byte): byte for byte in plain}
    return signs | {chr(256 + index): byte for index, byte in enumerate(others)}
