"""Put text into the recall model and read its greedy answers, with the margin of every choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

CHUNK = 512
FULL, Q4 = "full", "q4_g64"


class Answer(NamedTuple):
    """What was generated, and how far the runner-up was in the closest choice."""

    ids: list[int]
    margin: float


class Memory:
    """A model with the context that it holds, in a full-precision or a 4-bit cache."""

    def __init__(
        self, folder: Path | str, kind: str, loaded: tuple[Any, Any] | None = None
    ) -> None:
        self.model, self.tokenizer = loaded or mlx_lm.load(str(folder))[:2]
        make = KVCache if kind == FULL else lambda: QuantizedKVCache(group_size=64, bits=4)
        self.cache: list[Any] = [make() for _ in self.model.layers]
        self.ids: list[int] = []

    def _forward(self, ids: Sequence[int]) -> mx.array:
        """Run a chunk and return the logits of its last token."""
        logits = self.model(mx.array(ids)[None], cache=self.cache)[0, -1]
        mx.eval(logits, [layer.state for layer in self.cache])
        self.ids += ids
        return logits

    def feed(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        for at in range(0, len(ids), CHUNK):
            self.model.model(mx.array(ids[at : at + CHUNK])[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
        self.ids += ids

    def trim(self, size: int) -> None:
        """Forget everything after the first ``size`` tokens."""
        for layer in self.cache:
            layer.trim(len(self.ids) - size)
        del self.ids[size:]

    def answer(self, ids: Sequence[int], most: int) -> Answer:
        """Append tokens and generate until the end of the answer; that token is kept too."""
        self.feed(ids[:-1])
        token, answer_ids, margins = ids[-1], list[int](), list[float]()
        while len(answer_ids) < most:
            logits = np.array(self._forward([token]))
            second, first = np.sort(logits)[-2:]
            margins.append(float(first - second))
            token = int(logits.argmax())
            answer_ids.append(token)
            if token in self.tokenizer.eos_token_ids:
                self._forward([token])
                break
        return Answer(answer_ids, min(margins))

    def chat(self, messages: list[dict[str, Any]], most: int = 200, **options: Any) -> Answer:
        """Answer a conversation whose beginning is in the cache already, or must be."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if ids[: len(self.ids)] != self.ids:
            message = "the conversation does not begin with what is in the cache"
            raise ValueError(message)
        return self.answer(ids[len(self.ids) :], most)

    def text(self, answer: Answer) -> str:
        """Return the words of an answer."""
        ids = [token for token in answer.ids if token not in self.tokenizer.eos_token_ids]
        return str(self.tokenizer.decode(ids))
