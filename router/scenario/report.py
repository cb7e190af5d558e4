"""What a run cost, by phase and agent, and what a warm one saves against a cold one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from router.scenario.run_state import RunState
from router.scenario.speaker import TurnFigures
from router.scenario.utterance import TurnKey


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One agent in one phase; times are of its answers, bytes of copies made there."""

    phase: str
    agent: str
    answers: int
    ttft_median_s: float
    ttft_min_s: float
    ttft_max_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    moved_bytes: int
    nodes: tuple[str, ...]  # where it answered, in order, without repeats

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Saving:
    """Cold seconds for one warm second, of a phase or of all (`phase` is None)."""

    phase: str | None
    ttft: float  # of the medians
    total: float
    # Of the cold run's prompts, in its own phase or by other agents; None in older outcomes.
    cold_cached_share: float | None = None


def rows(state: RunState) -> Iterator[ReportRow]:
    """Yield a row for each agent that spoke in a phase, in the order of the file."""
    made: dict[tuple[str, str], list[TurnFigures]] = defaultdict(list)
    for turn, several in state.figures.items():
        made[turn.phase, turn.speaker] += several
    moved_bytes = Counter[tuple[str, str]]()
    for copy in state.copies:
        moved_bytes[copy.phase, copy.agent] += copy.copied.sent_bytes
    for phase in state.scenario.phases:
        for agent in phase.agents:
            if found := made.get((phase.id, agent)):
                yield _row(phase.id, agent, found, moved_bytes[phase.id, agent])


def savings(warm: RunState, cold: RunState) -> Iterator[Saving]:
    """Yield what each phase that both have, and then the whole run, saved."""
    both = [
        phase.id
        for phase in warm.scenario.phases
        if list(_figures(warm, phase.id)) and list(_figures(cold, phase.id))
    ]
    for phase in both:
        yield _saving(phase, _figures(warm, phase), _figures(cold, phase))
    if both:
        yield _saving(None, _all(warm.figures), _all(cold.figures))


def _figures(state: RunState, phase: str) -> Iterator[TurnFigures]:
    for turn, several in state.figures.items():
        if turn.phase == phase:
            yield from several


def _all(figures: Mapping[TurnKey, Iterable[TurnFigures]]) -> Iterator[TurnFigures]:
    for several in figures.values():
        yield from several


def _row(phase: str, agent: str, found: list[TurnFigures], moved_bytes: int) -> ReportRow:
    times = [each.ttft_s for each in found]
    return ReportRow(
        phase,
        agent,
        len(found),
        median(times),
        min(times),
        max(times),
        sum(each.total_s for each in found),
        sum(each.prompt_tokens for each in found),
        sum(each.cached_tokens for each in found),
        sum(each.completion_tokens for each in found),
        moved_bytes,
        tuple(dict.fromkeys(each.node for each in found)),
    )


def _saving(phase: str | None, warm: Iterable[TurnFigures], cold: Iterable[TurnFigures]) -> Saving:
    one, other = list(warm), list(cold)
    return Saving(
        phase,
        _ratio(median(f.ttft_s for f in other), median(f.ttft_s for f in one)),
        _ratio(sum(f.total_s for f in other), sum(f.total_s for f in one)),
        _ratio(sum(f.cached_tokens for f in other), sum(f.prompt_tokens for f in other)),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
