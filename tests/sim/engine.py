"""An engine for the simulation: it computes at once, and says how long it would have taken."""

from dataclasses import dataclass, field

from fabric.limits import PREFILL_CHUNK_TOKENS_MIN
from node.mlx.engine import SampledToken
from tests.sim.model import FULL, SimCache, SimMark


@dataclass(eq=False)
class SimSlot:
    """One decoding sequence, one step ahead of what has been read."""

    cache: SimCache
    sampling: object
    seed: int
    pending: int
    pending_is_sampled: bool = False
    sampled_count: int = 0
    mark_before_read: SimMark | None = None
    unread: list = field(default_factory=list)

    def take_up(self, sampled_count):
        self.pending_is_sampled = True
        self.sampled_count = sampled_count


class SimEngine:
    """Computes at once and says in `spent_s` how long it would have taken."""

    note_start = staticmethod(lambda cache, prompt: None)  # of an answer

    def __init__(self, tokens_per_s, step_s, kind=FULL, note_cache=lambda cache: None):
        self.launch_waits = False
        self.chunk_tokens_max = PREFILL_CHUNK_TOKENS_MIN
        self.spent_s = 0.0
        self._tokens_per_s = tokens_per_s
        self._step_s = step_s
        self._kind = kind
        self._note_cache = note_cache

    def new_cache(self, capacity_tokens):
        cache = SimCache(capacity_tokens, self._kind)
        self._note_cache(cache)
        return cache

    def prefill(self, cache, tokens):
        self.spent_s += len(tokens) / self._tokens_per_s
        end = cache.tokens_count + len(tokens)
        assert not cache.ahead or end <= cache.ahead[0][0], "no step writes over what is there"
        for token in tokens:
            cache.append(token)
        cache.slide()

    def start(self, cache, prompt, sampling, seed):
        assert cache.tokens_count == len(prompt) - 1, "all but the last token are prefilled"
        self.note_start(cache, prompt)
        return SimSlot(cache, sampling, seed, prompt[-1])

    def launch(self, slots):
        self.spent_s += self._step_s
        for slot in slots:
            slot.mark_before_read = slot.cache.mark()
            slot.cache.append(slot.pending)
            if slot.pending_is_sampled:
                slot.unread.append(slot.pending)
            slot.pending = slot.cache.next_token(slot.sampling, slot.seed, slot.sampled_count)
            slot.sampled_count += 1
            slot.pending_is_sampled = True

    def check(self):
        """Nothing fails later than it is launched."""

    check_all = return_unused = check

    def peek(self, slot):
        return _sampled(slot, slot.pending) if slot.pending_is_sampled else None

    def read(self, slot):
        unread, slot.unread = slot.unread, []
        return [_sampled(slot, token) for token in unread]


def _sampled(slot, token):
    if slot.sampling.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, ((token, slot.cache.logprob()),))
