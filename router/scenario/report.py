"""Cost of a run by phase and agent, and the savings of a warm arm over a cold one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from router.scenario.fabric_client import TurnFigures
from router.scenario.run_state import RunState
from router.scenario.transcript import TurnKey


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Figures of one agent in one phase: times of its answers, bytes of its copies."""

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
    nodes: tuple[str, ...]  # distinct nodes that answered, in order

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Saving:
    """Ratio of cold to warm seconds of a phase, or of the whole run (`phase` is None)."""

    phase: str | None
    ttft: float  # of the medians
    total: float
    # Share of the cold arm's prompts that was cached anyway; None in older outcomes.
    cold_cached_share: float | None = None


def rows(state: RunState) -> Iterator[ReportRow]:
    """Yield a row for each agent that answered in a phase, in the order of the file."""
    figures: dict[tuple[str, str], list[TurnFigures]] = defaultdict(list)
    for turn, answers in state.figures.items():
        figures[turn.phase, turn.speaker] += answers
    moved_bytes = Counter[tuple[str, str]]()
    for copy in state.copies:
        moved_bytes[copy.phase, copy.agent] += copy.copied.sent_bytes
    for phase in state.scenario.phases:
        for agent in phase.agents:
            if answers := figures[phase.id, agent]:
                yield _row(phase.id, agent, answers, moved_bytes[phase.id, agent])


def savings(warm: RunState, cold: RunState) -> Iterator[Saving]:
    """Yield the savings of each phase that both arms have, and then of the whole run."""
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
    for turn, answers in state.figures.items():
        if turn.phase == phase:
            yield from answers


def _all(figures: Mapping[TurnKey, Iterable[TurnFigures]]) -> Iterator[TurnFigures]:
    for answers in figures.values():
        yield from answers


def _row(phase: str, agent: str, answers: list[TurnFigures], moved_bytes: int) -> ReportRow:
    times = [answer.ttft_s for answer in answers]
    return ReportRow(
        phase,
        agent,
        len(answers),
        median(times),
        min(times),
        max(times),
        sum(answer.total_s for answer in answers),
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.cached_tokens for answer in answers),
        sum(answer.completion_tokens for answer in answers),
        moved_bytes,
        tuple(dict.fromkeys(answer.node for answer in answers)),
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
