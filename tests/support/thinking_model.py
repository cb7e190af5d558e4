"""A real fabric whose model thinks until something ends its thought, and then gives its answer.

All is the product's, and all is computed; only the likeliest token is chosen, by the text so
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
        """Note the mind of a sequence, and the tokens of other nodes."""
        resume, sampling = request.resume, sequence.input.sampling
        said_ids = [*resume.answer_ids, resume.sampled] if resume is not None else []
        self.sequences.append(sequence)
        self._known[id(sampling)] = (sampling, self.mind(request), said_ids, parts.tokenizer)

    def sampler(self, original: Sampler) -> Sampler:
        """Return a sampler with a mind; samplers of self-tests are unchanged."""
        known = self._known.pop(id(original.sampling), None)
        if known is None:
            return original
        _, mind, said_ids, tokenizer = known
        return _Thinker(
            original.sampling,
            original.seed,
            original.processors,
            original.history,
            mind=mind,
            said_ids=said_ids,
            tokenizer=tokenizer,
        )


@dataclass(slots=True)
class _Thinker(Sampler):
    mind: Mind | None = None
    said_ids: list[int] = field(default_factory=list)
    tokenizer: ChatTokenizer | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Prevent sampling that bypasses this sampler."""
        return False

    def next(self) -> int:
        """Return the token that the model would say next."""
        text = self.tokenizer.decode(self.said_ids)
        _, mark, answered = text.partition(self.mind.mark)
        if not mark:
            thought = self.tokenizer.encode(self.mind.thought).ids
            return thought[min(len(self.said_ids), len(thought) - 1)]
        answer = self.tokenizer.encode(self.mind.answer).ids
        texts = [self.tokenizer.decode(answer[:count]) for count in range(len(answer))]
        answered = answered.lstrip("\n")
        return answer[texts.index(answered) if answered in texts else -1]

    def sample(self, logits, allowed=None, openings=()):
        is_next = mx.arange(logits.shape[-1]) == self.next()
        biased_logits = mx.where(is_next, _SURE, mx.clip(logits, -_SURE / 2, _SURE / 2))
        # Zero-argument super() does not find the class that slots made.
        token, logprobs = Sampler.sample(self, biased_logits, allowed, openings)
        self.said_ids.append(token.item())
        return token, logprobs

    def force(self, logits, token):
        self.said_ids.append(token)
        return Sampler.force(self, logits, token)


@contextmanager
def thinking(mind: Callable[[GenerateRequest], Mind]) -> Iterator[ThinkingModel]:
    """Let all nodes of this process think so, for a block of code."""
    model, make, choose = ThinkingModel(mind), Sequences.make, engine.make_sampler

    def make_sequence(parts, request, prepared, prompt, emit, head):
        sequence = make(parts, request, prepared, prompt, emit, head)
        model.hear(parts, request, sequence)
        return sequence

    with (
        mock.patch.object(Sequences, "make", make_sequence),
        mock.patch.object(
            engine, "make_sampler", lambda *arguments: model.sampler(choose(*arguments))
        ),
    ):
        yield model
