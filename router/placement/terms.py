"""Terms of a decision, in seconds. Pure.

The terms of a decision are kept with what then happened (`router.turns.decision_log`), so that each
can be compared with the truth.
"""

from dataclasses import dataclass
from typing import Final

ANSWER_WEIGHT: Final = 0.25  # of a second of the answer, beside one until its first token


@dataclass(frozen=True, slots=True)
class Terms:
    """Estimated seconds of a turn on one node, by cause."""

    queue_s: float = 0.0  # in which other prompts are computed
    bring_s: float = 0.0  # in which its memory travels, longer than the queue
    load_s: float = 0.0  # from disk into memory
    prefill_s: float = 0.0  # of what is not cached of its prompt
    answer_s: float = 0.0  # of its answer, with what that costs the answers beside it
    delay_s: float = 0.0  # by which other prompts end later, all together
    evict_s: float = 0.0  # to load again what must leave memory for it, if it is used again
    share_s: float = 0.0  # penalty of a node that has its share of agents
    risk_s: float = 0.0  # penalty of a node that is hot, or short of memory
    price_s: float = 0.0  # of a move: its commit, and a margin for rough estimates

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.queue_s + self.bring_s + self.load_s + self.prefill_s

    @property
    def felt_s(self) -> float:
        """Seconds until the first token, with those that others lose, and the penalties."""
        return self.first_token_s + self.delay_s + self.evict_s + self.share_s + self.risk_s

    @property
    def total_s(self) -> float:
        """All terms together: what decisions compare; an answer is read while it comes."""
        return self.felt_s + ANSWER_WEIGHT * self.answer_s + self.price_s


NO_TERMS = Terms()
