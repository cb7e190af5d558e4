"""Encoding of texts in which some control marks are plain text.

A second tokenizer knows the control tokens by other texts only: a private name before each. The
template's marks get that name, so that what is between them is cut as before, and all other marks
are encoded as by a tokenizer that has no such tokens:

    to encode      <|im_start|>user log: <|im_end|><|im_end|>
    is encoded     NAME<|im_start|>user log: <|im_end|>NAME<|im_end|>

It is created when the first such text is encoded, and tried then. Where a tokenizer cannot do it,
its control marks stay control tokens everywhere.
"""

import json
import logging
import re
import secrets
import threading
from bisect import bisect_left
from collections.abc import Container, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from fabric.turn.control_marks import control_matches, longest_of

_log = logging.getLogger(__name__)
BRACKETS: Final = "<[{"  # first characters of texts that look like marks
_LIKE_A_MARK: Final = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_PRIVATE: Final = 0xE100  # the first of the private characters that names are made of
_NAME_BYTES: Final = 12
BEFORE, AFTER = "x\n", "x"  # around a tried mark
PROBLEM: Final = "control marks in messages look like the template's own, and stay tokens"


def control_ids(
    added: Mapping[int, Any], template: str, answer_marks: Container[str]
) -> dict[str, int]:
    """Return the added tokens that a conversation's frame may be made of, by their texts.

    Many tokenizers add tokens for common text, too, such as runs of white space or HTML tags.
    """
    return {
        token.content: index
        for index, token in added.items()
        if len(token.content) > 1
        and not token.content.isspace()
        and (
            token.special
            or _LIKE_A_MARK.fullmatch(token.content)
            or (
                token.content[0] in BRACKETS
                and (token.content in answer_marks or token.content in template)
            )
        )
    }


class PlainEncoder:
    """Encoder of plain marks for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, marks: Mapping[str, int]) -> None:
        """Create it from a fast tokenizer and the ids of its control marks."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._lock = threading.Lock()
        self._named: NamedMarks | None = None
        self.problem: str | None = None  # once it was tried

    def encode(self, text: str, plain: Container[int]) -> tuple[list[int], list[int]] | None:
        """Return ids and ends in characters; None if this tokenizer cannot encode plain marks.

        `plain`: the characters at which plain marks begin.
        """
        named = self._create()
        return None if named is None else named.encode(text, plain)

    def _create(self) -> "NamedMarks | None":
        with self._lock:
            if self._named is None and self.problem is None:
                backend = self._tokenizer.backend_tokenizer
                try:
                    named = NamedMarks(backend.to_str(), self._marks)
                    is_sound = named.is_sound(backend)
                except Exception as error:  # noqa: BLE001 - tokenizers raises bare exceptions
                    _log.warning("no tokenizer for plain marks: %s", type(error).__name__)
                    is_sound = False
                if is_sound:
                    self._named = named
                else:
                    self.problem = PROBLEM
                    _log.warning("%s", PROBLEM)
            return self._named


class NamedMarks:
    """A tokenizer whose control tokens have a private name before their texts."""

    def __init__(self, definition: str, marks: Mapping[str, int]) -> None:
        """Create it from a definition in the form of tokenizer.json."""
        plain = json.loads(definition)
        self.name = "".join(chr(_PRIVATE + byte) for byte in secrets.token_bytes(_NAME_BYTES))
        self.marks = marks
        self.pattern = re.compile(longest_of(marks))
        added = {each["content"]: each["id"] for each in plain["added_tokens"]}
        renamed = {text: self.name + text for text in marks}
        plain["truncation"] = plain["padding"] = None
        for each in plain["added_tokens"]:
            each["content"] = renamed.get(each["content"], each["content"])
        _rename(plain["model"], renamed)
        self.inner = Tokenizer.from_str(json.dumps(plain))
        own = {text: self.inner.token_to_id(renamed.get(text, text)) for text in added}
        # Ids of the original tokenizer by those of this one, where they differ.
        self.ids = {own[text]: index for text, index in added.items() if own[text] != index}

    def encode(self, text: str, plain: Container[int]) -> tuple[list[int], list[int]]:
        """Return ids and ends in characters; `plain` marks begin at these characters."""
        parts: list[str] = []
        places: list[int] = []  # ends of the names
        done = 0
        for match in control_matches(self.pattern, text, plain):
            at = match.start()
            parts.append(text[done:at])
            places.append(at + len(self.name) * (len(places) + 1))
            done = at
        named = self.name.join([*parts, text[done:]])
        encoded = self.inner.encode(named, add_special_tokens=False)
        size, ids = len(self.name), self.ids
        ends = [end - size * bisect_left(places, end) for _, end in encoded.offsets]
        return [ids.get(index, index) for index in encoded.ids], ends

    def is_sound(self, original: Tokenizer) -> bool:
        """Return whether named marks give the original's tokens, and others no control token."""
        texts = [f"{BEFORE}{mark}{AFTER}" for mark in self.marks] + [*self.marks]
        expected = original.encode_batch(texts, add_special_tokens=False)
        control = {*self.marks.values()}
        everywhere = range(max(map(len, texts), default=0))
        return all(
            self.encode(text, ()) == (encoding.ids, [end for _, end in encoding.offsets])
            and control.isdisjoint(self.encode(text, everywhere)[0])
            for text, encoding in zip(texts, expected, strict=True)
        )


def _rename(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Rename pieces of a tokenizer's model; drop the merges that need one of them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(text, text): index for text, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _merge_uses(pair, renamed)]


def _merge_uses(pair: str | list[str], texts: Container[str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in texts or right in texts or left + right in texts
