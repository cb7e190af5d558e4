"""A real model whose sampled tokens are scripted; everything else is computed."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import mlx.core as mx

from node.mlx import engine


@dataclass
class Script:
    """Next tokens to sample, for one sequence at a time; then always the end token."""

    end: int | None = None  # None: no script yet, as while a starting node tests itself
    tokens: deque[int] = field(default_factory=deque)

    def next(self) -> int:
        assert self.end is not None, "a script needs an end token"
        return self.tokens.popleft() if self.tokens else self.end


@contextmanager
def scripted() -> Iterator[Script]:
    """Sample all tokens of this block from the script."""
    script, choose = Script(), engine._sampled_of

    def sampled(slots, logits):
        if script.end is None:
            return choose(slots, logits)
        mx.eval(logits)
        return [(mx.array([script.next()], mx.uint32), None) for _ in slots]

    with mock.patch.object(engine, "_sampled_of", sampled):
        yield script
