"""Workloads whose sessions share beginnings, or do not fit the fleet's memory.

Most sizes of published workloads are divided by four; docs/simulate.md names the sources.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from fabric.errors import RejectedError
from router.simulate.content import Segment, segment
from router.simulate.sessions import Ask, Script
from router.simulate.workload import Scale, SessionSeed, Workload

_SYSTEM: Final = 0x73797374  # kinds of segments
_GROUP: Final = 0x67727570
_DOCUMENT: Final = 0x646F6373
_MESSAGE: Final = 0x6D657373

GROUP_TOKENS: Final = 2_000
GROUP_MEMORY: Final = 0.73  # of the fleet's memory that the beginnings of all groups fill
DOCUMENT_TOKENS: Final = 8_000  # of which a fifth is new each time
DOCUMENT_OVERFLOW: Final = 1.05  # of the memory that all documents fill, in rounds
GROUPS: Final = (4, 83)  # at least, and at most as in the published workload
DOCUMENTS: Final = (8, 4_000)
SIBLINGS: Final = 4
PINNED_EVERY: Final = 40  # sessions of a flood beside one long-lived session
FLOOD_PAUSE_S: Final = 300.0


def _fresh(random: Random) -> Segment:
    return segment(_MESSAGE, random.getrandbits(60))


def groups_of(scale: Scale) -> int:
    """Return how many groups fill their part of a fleet's memory, within bounds."""
    least, most = GROUPS
    return max(least, min(most, round(GROUP_MEMORY * scale.hot_tokens / GROUP_TOKENS)))


def grouped_prompts(seed: SessionSeed) -> Iterable[Script]:
    """W2: single questions, each after the long beginning of one of many groups."""
    random = seed.random
    group = random.randrange(groups_of(seed.scale))
    parts = ((segment(_GROUP, group), GROUP_TOKENS), (_fresh(random), 250))
    return (iter((Ask(parts, 250),)),)


def documents_of(scale: Scale) -> int:
    """Return how many documents overflow a fleet's memory, within bounds."""
    least, most = DOCUMENTS
    return max(least, min(most, round(DOCUMENT_OVERFLOW * scale.hot_tokens / DOCUMENT_TOKENS)))


def overflowing_documents(seed: SessionSeed) -> Iterable[Script]:
    """W5: documents in an endless round, the worst case of any eviction by last use."""
    document = segment(_DOCUMENT, seed.number % documents_of(seed.scale))
    parts = ((document, 6_400), (_fresh(seed.random), 1_600))
    return (iter((Ask(parts, 32),)),)


def siblings(seed: SessionSeed) -> Iterable[Script]:
    """W7: several samples of one problem at the same moment, after a common system prompt."""
    parts = ((segment(_SYSTEM, 7), 2_048), (_fresh(seed.random), 1_024))
    return tuple(iter((Ask(parts, 256),)) for _ in range(SIBLINGS))


def pinned_and_flood(seed: SessionSeed) -> Iterable[Script]:
    """W8: few long-lived sessions, which pause while many single prompts flood the memory."""
    if seed.number % PINNED_EVERY == 0:
        return (_paused_session(seed.random),)
    return (iter((Ask(((_fresh(seed.random), 1_000),), 64),)),)


def _paused_session(random: Random) -> Script:
    system = (segment(_SYSTEM, 8), 2_000)
    for turn in range(10):
        first = (system, (_fresh(random), 500)) if turn == 0 else ()
        delay_s = 0.0 if turn == 0 else FLOOD_PAUSE_S if turn == 5 else random.uniform(2, 10)
        yield Ask((*first, (_fresh(random), 200)), 100, delay_s)


@dataclass(frozen=True, slots=True)
class HitRate:
    """Conversation of a given mean prompt and share of it that is cached."""

    prompt_tokens: int = 4_000  # mean over all turns
    cached_share: float = 0.8
    turns: int = 5
    answer_tokens: int = 100

    @property
    def user_tokens(self) -> int:
        """Tokens that each turn adds: what is not cached of a mean prompt."""
        return round(self.prompt_tokens * (1 - self.cached_share))

    @property
    def system_tokens(self) -> int:
        """Tokens of the common beginning; raise RejectedError if there can be none."""
        grown = self.user_tokens * (self.turns + 1) / 2
        answered = self.answer_tokens * (self.turns - 1) / 2
        tokens = round(self.prompt_tokens - grown - answered)
        if tokens < 0:
            message = (
                f"{self.turns} turns of a mean prompt of {self.prompt_tokens} tokens cannot have "
                f"{self.cached_share:.0%} of it cached: use fewer turns, or more of the cache"
            )
            raise RejectedError(message, code="infeasible_workload")
        return tokens


def solved_hit_rate(seed: SessionSeed) -> Iterable[Script]:
    """W9: conversations after one beginning, whose cached share is exactly known."""
    return (_solve_script(seed.random, HitRate()),)


def _solve_script(random: Random, wanted: HitRate) -> Script:
    for turn in range(wanted.turns):
        first = ((segment(_SYSTEM, 9), wanted.system_tokens),) if turn == 0 else ()
        delay_s = 0.0 if turn == 0 else random.uniform(2, 15)
        yield Ask((*first, (_fresh(random), wanted.user_tokens)), wanted.answer_tokens, delay_s)


SHARED_BEGINNINGS: Final = (
    Workload("W2", "questions after the beginnings of groups", grouped_prompts, 1_500),
    Workload("W5", "documents in rounds that overflow memory", overflowing_documents, 1_300),
    Workload("W7", "samples of one problem at once", siblings, 400),
    Workload("W8", "long-lived sessions against a flood", pinned_and_flood, 1_500),
    Workload("W9", "conversations with a known cached share", solved_hit_rate, 400),
)
