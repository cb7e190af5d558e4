"""Simulated engine: computes at once and reports how long the device would have taken."""

import sys
from dataclasses import dataclass

from node.limits import PREFILL_CHUNK_TOKENS_MIN
from node.mlx.device import DeviceError
from node.mlx.engine import SampledToken
from tests.sim.model import FULL, SimCache, SimMark


@dataclass(eq=False)
class SimSlot:
    """One decoding sequence and the token to feed next."""

    cache: SimCache
    sampling: object
    seed: int
    pending: int
    pending_is_sampled: bool = False
    sampled_count: int = 0
    mark_before_read: SimMark | None = None

    def take_up(self, sampled_count):
        self.pending_is_sampled = True
        self.sampled_count = sampled_count

    def sample(self):
        """Sample the next token after all that the cache holds."""
        self.pending = self.cache.next_token(self.sampling, self.seed, self.sampled_count)
        self.sampled_count += 1
        self.pending_is_sampled = True


class SimDevice:
    """A device that fails now and then: one operation computes garbage, a later one raises.

    `chance`: of a failure, per operation.
    """

    def __init__(self, random, chance):
        self._random = random
        self._chance = chance
        self.has_failed = False  # and its error is not yet raised

    def begin(self):
        """Begin an operation; return whether it will compute something wrong."""
        self.check()
        self.has_failed = self._chance > 0 and self._random.random() < self._chance
        return self.has_failed

    def check(self):
        """Raise the error of an operation that is complete, once."""
        if self.has_failed:
            self.has_failed = False
            message = "a simulated command buffer failed"
            raise DeviceError(message)


class SimStep:
    """A step of some slots; nothing is computed before its launch."""

    def __init__(self, slots):
        self.slots = slots

    def undo(self):
        """Do nothing: nothing is computed yet."""


class SimEngine:
    """An engine that computes at once; `spent_s` is how long a device would have taken."""

    is_opaque = False
    note_start = staticmethod(lambda cache, prompt: None)  # called where an answer begins

    def __init__(self, tokens_per_s, step_s, kind=FULL, note_cache=lambda cache: None, device=None):
        self.device = device or SimDevice(None, 0)
        self.launch_waits = False
        self.chunk_tokens_max = PREFILL_CHUNK_TOKENS_MIN
        self.spent_s = 0.0
        self._tokens_per_s = tokens_per_s
        self._step_s = step_s
        self._kind = kind
        self._note_cache = note_cache

    def pairs_max(self, position):
        return sys.maxsize

    def new_cache(self, capacity_tokens):
        cache = SimCache(capacity_tokens, self._kind)
        self._note_cache(cache)
        return cache

    def prefill(self, cache, tokens):
        self.spent_s += len(tokens) / self._tokens_per_s
        is_wrong = self.device.begin()
        end = cache.tokens_count + len(tokens)
        assert not cache.ahead or end <= cache.ahead[0][0], "no step overwrites the rows ahead"
        for token in tokens:
            cache.append(token ^ is_wrong)
        cache.slide()
        return cache

    def start(self, cache, prompt, sampling, seed):
        assert cache.tokens_count >= len(prompt) - 1, "all but the last token are prefilled"
        if not self.device.has_failed:  # else its output is dropped
            self.note_start(cache, prompt)
        return SimSlot(cache, sampling, seed, prompt[-1])

    def sample_first(self, slot, logits):
        assert logits is slot.cache
        slot.sample()

    def prepare(self, slots):
        return SimStep(slots)

    def launch(self, step):
        self.spent_s += self._step_s
        is_wrong = self.device.begin()
        for slot in step.slots:
            slot.mark_before_read = slot.cache.mark()
            slot.cache.append(slot.pending ^ is_wrong)
            slot.sample()

    def check(self):
        self.device.check()

    return_unused = check

    def recover(self):
        """Do nothing: the error was raised."""

    def peek(self, slot):
        return _sampled(slot, slot.pending) if slot.pending_is_sampled else None

    read = peek


def _sampled(slot, token):
    if slot.sampling.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, ((token, slot.cache.logprob()),))
