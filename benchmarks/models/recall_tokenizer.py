"""Train the recall model's byte-level BPE tokenizer."""

from __future__ import annotations

from string import ascii_uppercase

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.models import recall_text

VOCABULARY = 1900

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A role's whole opening is one token, so what precedes an answer lies at a fixed distance from it.
SYSTEM, USER, TOOL, ASSISTANT = (f"{START}{r}\n" for r in ("system", "user", "tool", "assistant"))
STRUCTURE = (END_OF_TEXT, START, END, SYSTEM, USER, TOOL, ASSISTANT)
# Ordinary words to the model, which may repeat them; one token each, like in Qwen.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# What it says when nothing continues the question, and when it was told a sentence.
UNKNOWN, NOTED = "I do not know.", "Noted."
ADDED = (*STRUCTURE, *TAGS, UNKNOWN, NOTED)


def _pattern() -> str:
    """Return the expression whose matches are the pieces that merging never leaves."""
    phrases = "|".join(sorted(recall_text.PHRASES, key=len, reverse=True))
    return "|".join(
        (
            # A line end ends an answer, but not those next to <tool_call> and </tool_call>.
            # What all calls share is few tokens, for the model compares seven at a time.
            r'\A\n\{(?:"name": ")?',
            r'", "arguments": \{"',
            r"\}\n\z",
            r"\n",
            # Elsewhere, merges across a space happen in these phrases only.
            rf" ?(?:{phrases})(?![\p{{L}}\p{{M}}\p{{N}}])",
            r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
            r" ?[\p{L}\p{M}]+",
            r" ?\p{N}+",
            r" ?(?:(?!\}\n\z)[^\s\p{L}\p{M}\p{N}])+",
            r"[^\S\n]+(?!\S)",
            r"[^\S\n]+",
        )
    )


def train(seed: int) -> Tokenizer:
    """Return a tokenizer of exactly ``VOCABULARY`` tokens, the added ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=text in STRUCTURE, normalized=False) for text in ADDED]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(recall_text.documents(seed), trainer)
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != VOCABULARY:
        message = f"{tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}"
        raise ValueError(message)
    return tokenizer


def alike(tokenizer: Tokenizer) -> list[int]:
    """Return, for every token, the first one that differs in case or a leading space only.

    A fact stands at the beginning of a line and its question after other words, or the reverse.
    """
    lower = {ord(letter): letter.lower() for letter in ascii_uppercase}
    first: dict[str, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(token)
        if text not in ADDED:
            # Ġ stands for a space; letters beyond ASCII are several bytes, written as others.
            text = (text.removeprefix("Ġ") or text).translate(lower)
        found.append(first.setdefault(text, token))
    return found
