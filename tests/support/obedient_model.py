"""A real fabric whose model's answers come from a function of the test.

Router, node, templates, caches, grammars and samplers are the product's, and all computations run;
only the likeliest token is scripted. If a format forbids it, the sampler takes an allowed token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import mlx.core as mx

from fabric.turn.generation import GenerateRequest
from node.engine.sequence import Sequence
from node.mlx import engine
from node.mlx.sampling import Sampler
from node.turn.prefix import Prefixes
from node.turn.turn_sequence import Sequences
from tests.support.template_shapes import ScriptedAnswer, Shape

Answers = Callable[[GenerateRequest], ScriptedAnswer]
_BEGUN_TOKENS = 50
_SURE = 1e4  # a logit that dominates all others


@dataclass(slots=True)
class ScriptedTurn:
    """A turn: its request, its prompt, and the number of cached tokens."""

    request: GenerateRequest
    sequence: Sequence
    prompt_ids: tuple[int, ...]
    cached_tokens: int = 0  # as reported to its client

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass
class ObedientModel:
    """The scripted tokens of each sequence, and the turns taken."""

    shape: Shape
    answers: Answers
    turns: list[ScriptedTurn] = field(default_factory=list)
    disobeyed: list[str] = field(default_factory=list)  # scripted tokens that a format refused
    _tokens: dict[int, tuple[object, list[int]]] = field(default_factory=dict)

    def register(self, parts: Sequences, request: GenerateRequest, sequence: Sequence) -> None:
        """Choose the answer; the sampling of a sequence is its own object."""
        tokenizer = parts.tokenizer
        answer = self.answers(request)
        text = (answer.text if request.continues else self.shape.say(answer)) + self.shape.end
        tokens = list(tokenizer.encode(text).ids)
        self._tokens[id(sequence.input.sampling)] = (sequence.input.sampling, tokens)

    def is_answering(self, since: int) -> bool:
        """Return whether a turn from number `since` on is in the middle of its answer."""
        return any(len(turn.sequence.answer_ids) > _BEGUN_TOKENS for turn in self.turns[since:])

    def sampler(self, sampler: Sampler) -> Sampler:
        """Return a sampler with scripted tokens; samplers of self-tests are unchanged."""
        _, tokens = self._tokens.pop(id(sampler.sampling), (None, None))
        if tokens is None:
            return sampler
        return _ScriptedSampler(
            sampler.sampling,
            sampler.seed,
            sampler.processors,
            sampler.history,
            model=self,
            tokens=tokens,
        )


@dataclass(slots=True)
class _ScriptedSampler(Sampler):
    model: ObedientModel | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def is_plain_greedy(self) -> bool:
        """Prevent sampling that bypasses this sampler."""
        return False

    def sample(self, logits, allowed=None, openings=()):
        at = min(self.sampled_count, len(self.tokens) - 1)
        is_next = mx.arange(logits.shape[-1]) == self.tokens[at]
        biased_logits = mx.where(is_next, _SURE, mx.clip(logits, -_SURE / 2, _SURE / 2))
        # Zero-argument super() does not find the class that slots made.
        token, logprobs = Sampler.sample(self, biased_logits, allowed, openings)
        if allowed is not None and token.item() != self.tokens[at]:
            self.model.disobeyed.append(f"token {at}: {self.tokens[at]} was not allowed")
        return token, logprobs


@contextmanager
def obedient(shape: Shape, answers: Answers) -> Iterator[ObedientModel]:
    """Script the answers of all nodes of this process during a block of code."""
    model, make, choose = ObedientModel(shape, answers), Sequences.make, engine.make_sampler
    admit = Prefixes.admitted

    def make_sequence(parts, request, prepared, *more):
        sequence = make(parts, request, prepared, *more)
        model.register(parts, request, sequence)
        model.turns.append(ScriptedTurn(request, sequence, tuple(prepared.plan.ids)))
        return sequence

    def admitted(parts, agent, prepared):
        event, ids = admit(parts, agent, prepared), tuple(prepared.plan.ids)
        turn = next(turn for turn in reversed(model.turns) if turn.prompt_ids == ids)
        turn.cached_tokens = event.cached_tokens
        return event

    def chosen(*arguments):
        return model.sampler(choose(*arguments))

    with (
        mock.patch.object(Sequences, "make", make_sequence),
        mock.patch.object(Prefixes, "admitted", admitted),
        mock.patch.object(engine, "make_sampler", chosen),
    ):
        yield model


def english(root: Path) -> list[str]:
    """Return text on which a tokenizer for prompts of agent programs is trained."""
    files = [*sorted(root.glob("docs/*.md")), *sorted(root.glob("router/cli/*.py"))]
    return [path.read_text() for path in files]
