"""A real fabric whose model thinks until its thought is ended, and then answers.

All code is the product's, and all computations run; only the likeliest token is scripted, by the
text so far. So the answer follows a thought that is ended from outside, on any node.
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

_SURE = 1e4  # a logit that dominates all others


@dataclass(frozen=True, slots=True)
class ThoughtScript:
    """Script of a model: its endless thought, and its answer after `mark`."""

    thought: str
    mark: str
    answer: str


@dataclass
class ThinkingModel:
    """The scripts of all sequences, and the sequences themselves."""

    script: Callable[[GenerateRequest], ThoughtScript]
    sequences: list[Sequence] = field(default_factory=list)
    _scripts: dict[int, tuple[object, ThoughtScript, list[int], ChatTokenizer]] = field(
        default_factory=dict
    )

    def register(self, parts: Sequences, request: GenerateRequest, sequence: Sequence) -> None:
        """Register a sequence with its script, and the tokens generated on other nodes."""
        resume, sampling = request.resume, sequence.input.sampling
        answer_ids = [*resume.answer_ids, resume.sampled] if resume is not None else []
        self.sequences.append(sequence)
        self._scripts[id(sampling)] = (sampling, self.script(request), answer_ids, parts.tokenizer)

    def sampler(self, original: Sampler) -> Sampler:
        """Return a scripted sampler; samplers of self-tests are unchanged."""
        entry = self._scripts.pop(id(original.sampling), None)
        if entry is None:
            return original
        _, script, answer_ids, tokenizer = entry
        return _ScriptedThinker(
            original.sampling,
            original.seed,
            original.processors,
            original.history,
            script=script,
            answer_ids=answer_ids,
            tokenizer=tokenizer,
        )


@dataclass(slots=True)
class _ScriptedThinker(Sampler):
    script: ThoughtScript | None = None
    answer_ids: list[int] = field(default_factory=list)
    tokenizer: ChatTokenizer | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Prevent sampling that bypasses this sampler."""
        return False

    def next(self) -> int:
        """Return the next scripted token."""
        text = self.tokenizer.decode(self.answer_ids)
        _, mark, answered = text.partition(self.script.mark)
        if not mark:
            thought = self.tokenizer.encode(self.script.thought).ids
            return thought[min(len(self.answer_ids), len(thought) - 1)]
        answer = self.tokenizer.encode(self.script.answer).ids
        texts = [self.tokenizer.decode(answer[:count]) for count in range(len(answer))]
        answered = answered.lstrip("\n")
        return answer[texts.index(answered) if answered in texts else -1]

    def sample(self, logits, allowed=None, openings=()):
        is_next = mx.arange(logits.shape[-1]) == self.next()
        biased_logits = mx.where(is_next, _SURE, mx.clip(logits, -_SURE / 2, _SURE / 2))
        # Zero-argument super() does not find the class that slots made.
        token, logprobs = Sampler.sample(self, biased_logits, allowed, openings)
        self.answer_ids.append(token.item())
        return token, logprobs

    def force(self, logits, token):
        self.answer_ids.append(token)
        return Sampler.force(self, logits, token)


@contextmanager
def thinking(script: Callable[[GenerateRequest], ThoughtScript]) -> Iterator[ThinkingModel]:
    """Script the thoughts of all nodes of this process during a block of code."""
    model, make, choose = ThinkingModel(script), Sequences.make, engine.make_sampler

    def make_sequence(parts, request, prepared, prompt, emit, head):
        sequence = make(parts, request, prepared, prompt, emit, head)
        model.register(parts, request, sequence)
        return sequence

    with (
        mock.patch.object(Sequences, "make", make_sequence),
        mock.patch.object(
            engine, "make_sampler", lambda *arguments: model.sampler(choose(*arguments))
        ),
    ):
        yield model
