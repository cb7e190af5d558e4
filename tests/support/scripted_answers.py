"""A real model with scripted answers: all is computed, only the sampled tokens are scripted."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import mlx.core as mx

from node.mlx import engine


@dataclass
class Script:
    """Tokens to be sampled next, for one sequence at a time; then the end token for ever."""

    end: int | None = None  # None: nothing is scripted yet; a node tests itself as it starts
    tokens: deque[int] = field(default_factory=deque)

    def next(self) -> int:
        assert self.end is not None, "what is scripted has an end"
        return self.tokens.popleft() if self.tokens else self.end


@contextmanager
def scripted() -> Iterator[Script]:
    """Let what is sampled in this block come from the script."""
    script, choose = Script(), engine._sampled_of

    def sampled(slots, logits):
        if script.end is None:
            return choose(slots, logits)
        mx.eval(logits)
        return [(mx.array([script.next()], mx.uint32), None) for _ in slots]

    with mock.patch.object(engine, "_sampled_of", sampled):
        yield script
