"""An engine without a model, whose tokens depend on every token fed to its cache.

So a lost, repeated or misplaced token changes all later ones. `log` lists the steps in order.
"""

import sys
import zlib
from dataclasses import dataclass, fields
from types import SimpleNamespace

from fabric.turn.generation import Sampling
from node.dialect.answer_delta import AnswerDelta
from node.engine.memory_budget import MemoryBudget
from node.engine.scheduler import Scheduler
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceInput
from node.limits import PREFILL_CHUNK_TOKENS_MAX
from node.mlx.engine import SampledToken

TOKEN_BYTES = 10
END = 0  # never sampled


class BrokenError(RuntimeError):
    """A failure injected by a test."""


class FakeClock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s


class FakeCache:
    shifts = ()

    def __init__(self):
        self.tokens = []
        self.ahead = ()
        self._behind = []

    def put_ahead(self, start, tokens):
        """Place tokens after a hole that ends at `start`."""
        self.ahead = (*self.ahead, (start, start + len(tokens)))
        self._behind.append(tokens)

    def prefill(self, tokens):
        self.tokens += tokens
        if self.ahead:
            assert len(self.tokens) <= self.ahead[0][0], "no step overwrites existing rows"
            if len(self.tokens) == self.ahead[0][0]:
                self.ahead = self.ahead[1:]
                self.tokens += self._behind.pop(0)

    @property
    def ahead_tokens(self):
        return sum(end - start for start, end in self.ahead)

    @property
    def tokens_count(self):
        return len(self.tokens)

    @property
    def size_bytes(self):
        return TOKEN_BYTES * len(self.tokens)


@dataclass
class FakeSlot:
    cache: FakeCache
    seed: int
    pending: int
    pending_is_sampled: bool = False
    pending_is_read: bool = False
    fails_at: int | None = None

    def take_up(self, sampled_count):
        self.pending_is_sampled = True

    def sample(self):
        self.pending = next_token(self.cache.tokens, self.seed)
        self.pending_is_sampled, self.pending_is_read = True, False


@dataclass
class FakePrepared:
    slots: list
    counts: list  # of tokens in each cache

    def undo(self):
        """Do nothing: `prepare` changed nothing."""


class FakeEngine:
    """An engine that computes `tokens_per_s`; a slot or cache may be set to fail."""

    is_opaque = False

    def __init__(self, clock=None, tokens_per_s=1e9, *, launch_waits=False):
        self.launch_waits = launch_waits
        self.returned_count = 0  # how often memory of freed arrays was returned
        self.chunk_tokens_max = PREFILL_CHUNK_TOKENS_MAX
        self.log = []
        self._clock = clock or FakeClock()
        self._tokens_per_s = tokens_per_s

    def pairs_max(self, position):
        return sys.maxsize

    def prefill(self, cache, tokens):
        if getattr(cache, "is_broken", False):
            raise BrokenError
        self.log.append(("prefill", cache, len(tokens)))
        self._clock.now_s += len(tokens) / self._tokens_per_s
        cache.prefill(tokens)
        return list(cache.tokens)  # from which the next one follows

    def start(self, cache, prompt, sampling, seed):
        assert cache.tokens in (prompt[:-1], prompt)
        if sampling.top_k == 666:
            raise BrokenError
        return FakeSlot(cache, seed, prompt[-1], fails_at=getattr(cache, "fails_at", None))

    def sample_first(self, slot, logits):
        assert logits == slot.cache.tokens
        slot.sample()

    def prepare(self, slots):
        for slot in slots:
            if slot.fails_at is not None and slot.cache.tokens_count >= slot.fails_at:
                raise BrokenError
        return FakePrepared(slots, [slot.cache.tokens_count for slot in slots])

    def launch(self, step):
        slots = step.slots
        assert step.counts == [slot.cache.tokens_count for slot in slots]
        self.log.append(("decode", [slot.cache for slot in slots]))
        for slot in slots:
            slot.cache.tokens.append(slot.pending)
            slot.sample()

    def read(self, slot):
        if not slot.pending_is_sampled or slot.pending_is_read:
            return None
        slot.pending_is_read = True
        return SampledToken(slot.pending)

    def peek(self, slot):
        return None

    def check(self):
        """Do nothing: failures are raised at launch."""

    recover = check

    def return_unused(self):
        self.returned_count += 1


def next_token(tokens, seed):
    return 1 + zlib.crc32(repr((tokens, seed)).encode()) % 1_000


def expected(prompt, seed, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class FakeAnswer:
    def __init__(self):
        self.reader = SimpleNamespace(has_calls=False)
        self.text = ""
        self.ends = []
        self.fails_at = None

    def push(self, token):
        if self.fails_at is not None and len(self.ends) == self.fails_at:
            raise BrokenError
        self.text += f"{token} "
        self.ends.append(len(self.text))
        return AnswerDelta(text=f"{token} ")

    def finish(self, *, stopped, is_cut=False):
        return AnswerDelta()


def make_sequence(prompt_tokens, answer_tokens=8, *, cached=0, seed=1, top_k=0, **options):
    """Return a sequence and the list that receives its events."""
    events = []
    prompt = [1 + (seed * 7 + 3 * i) % 997 for i in range(prompt_tokens)]
    cache = FakeCache()
    cache.tokens = prompt[:cached]
    names = {option.name for option in fields(SequenceInput)} & options.keys()
    inputs = {name: options.pop(name) for name in names}
    sampling = Sampling(max_tokens=answer_tokens, top_k=top_k)
    sequence = Sequence(
        SequenceInput(prompt, sampling, seed, frozenset({END}), str, **inputs),
        cache=cache,
        answer=FakeAnswer(),
        emit=options.pop("emit", events.append),
        **options,
    )
    return sequence, events


def last_of(events):
    """Return the final event, which must be the only one."""
    final = [event for event in events if isinstance(event, Ended | Broke)]
    assert len(final) == 1
    assert events[-1] is final[0]
    return final[0]


def is_undisturbed(sequence, events):
    """Check whether the answer is the one that prompt and seed alone determine."""
    answer_ids = expected(
        sequence.input.prompt, sequence.input.seed, sequence.input.sampling.max_tokens
    )
    numbers = [event.index for event in events if isinstance(event, Produced)]
    return (
        last_of(events).answer_ids == answer_ids
        and numbers == list(range(len(answer_ids)))
        and sequence.cache.tokens == sequence.input.prompt + answer_ids
    )


class SchedulerRig:
    """A scheduler over a fake engine, one iteration at a time."""

    def __init__(
        self,
        *,
        active_max=8,
        total_bytes=1 << 40,
        make_room=None,
        tokens_per_s=1e9,
        launch_waits=False,
    ):
        self.clock = FakeClock()
        self.engine = FakeEngine(self.clock, tokens_per_s, launch_waits=launch_waits)
        self.budget = MemoryBudget(total_bytes, make_room)
        self.scheduler = Scheduler(
            self.clock, self.budget, active_max=active_max, exact_chunks=False
        )
        self.scheduler.engine = self.engine
        self.queue = self.scheduler.queue
        self.moving = self.scheduler._moving

    def add(self, *arguments, **options):
        sequence, events = make_sequence(*arguments, **options)
        self.scheduler.add(sequence)
        return sequence, events

    def run(self, iterations=10_000):
        """Iterate until the queue is empty, or `iterations` times."""
        for _ in range(iterations):
            if not any(self.queue):
                return
            self.scheduler.iterate()
        assert iterations < 10_000, "some sequence never ended"
