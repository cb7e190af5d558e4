"""A real fabric whose model thinks until something ends its thought, and then gives its answer.

All is the product's, and all is computed; only the likeliest token is told, from what was said so
far. So a thought that is ended from outside is followed by the answer, on whichever node.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import mlx.core as mx

from fabric.turn.generation import GenerateRequest
from node.engine.sequence import Sequence
from node.mlx import engine
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.sampling import Sampler
from node.turn.turn_sequence import Sequences

_SURE = 1e4  # a logit beside which all others are nothing


@dataclass(frozen=True, slots=True)
class Mind:
    """What a model thinks, without an end, and what it answers behind `mark`."""

    thought: str
    mark: str
    answer: str


@dataclass
class ThinkingModel:
    """The minds of all sequences, and the sequences themselves."""

    mind: Callable[[GenerateRequest], Mind]
    sequences: list[Sequence] = field(default_factory=list)
    _known: dict[int, tuple[object, Mind, list[int], ChatTokenizer]] = field(default_factory=dict)

    def hear(self, parts: Sequences, request: GenerateRequest, sequence: Sequence) -> None:
        """Note what to say, and what other nodes have said."""
        resume, sampling = request.resume, sequence.input.sampling
        said = [*resume.answer_ids, resume.sampled] if resume is not None else []
        self.sequences.append(sequence)
        self._known[id(sampling)] = (sampling, self.mind(request), said, parts.tokenizer)

    def sampler(self, made: Sampler) -> Sampler:
        """Return one that knows what to take; others, of a node that tests itself, stay."""
        known = self._known.pop(id(made.sampling), None)
        if known is None:
            return made
        _, mind, said, tokenizer = known
        return _Thinker(
            made.sampling,
            made.seed,
            made.processors,
            made.history,
            mind=mind,
            said=said,
            tokenizer=tokenizer,
        )


@dataclass(slots=True)
class _Thinker(Sampler):
    mind: Mind | None = None
    said: list[int] = field(default_factory=list)
    tokenizer: ChatTokenizer | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Let nobody choose past this sampler."""
        return False

    def next(self) -> int:
        """Return the token that the model would say next."""
        text = self.tokenizer.decode(self.said)
        _, mark, answered = text.partition(self.mind.mark)
        if not mark:
            thought = self.tokenizer.encode(self.mind.thought).ids
            return thought[min(len(self.said), len(thought) - 1)]
        answer = self.tokenizer.encode(self.mind.answer).ids
        texts = [self.tokenizer.decode(answer[:count]) for count in range(len(answer))]
        answered = answered.lstrip("\n")
        return answer[texts.index(answered) if answered in texts else -1]

    def sample(self, logits, allowed=None, openings=()):
        wanted = mx.arange(logits.shape[-1]) == self.next()
        told = mx.where(wanted, _SURE, mx.clip(logits, -_SURE / 2, _SURE / 2))
        # Zero-argument super() does not find the class that slots made.
        token, logprobs = Sampler.sample(self, told, allowed, openings)
        self.said.append(token.item())
        return token, logprobs

    def force(self, logits, token):
        self.said.append(token)
        return Sampler.force(self, logits, token)


@contextmanager
def thinking(mind: Callable[[GenerateRequest], Mind]) -> Iterator[ThinkingModel]:
    """Let all nodes of this process think so, for a block of code."""
    model, make, choose = ThinkingModel(mind), Sequences.make, engine.make_sampler

    def made(parts, request, prepared, prompt, emit, head):
        sequence = make(parts, request, prepared, prompt, emit, head)
        model.hear(parts, request, sequence)
        return sequence

    with (
        mock.patch.object(Sequences, "make", made),
        mock.patch.object(engine, "make_sampler", lambda *given: model.sampler(choose(*given))),
    ):
        yield model
