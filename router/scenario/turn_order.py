"""Order of turns: which may run next, given the turns that have ended."""

from collections.abc import Callable, Collection, Iterator

from router.scenario.scenario import Phase, Scenario, TurnOrder
from router.scenario.transcript import TurnKey


def earlier_phases(scenario: Scenario) -> dict[str, frozenset[str]]:
    """Return, by phase, all phases that have ended when it begins, directly or indirectly."""
    earlier: dict[str, frozenset[str]] = {}
    for phase in scenario.phases:
        named = tuple(earlier) if phase.after is None else phase.after
        direct = frozenset(name for name in named if name in earlier)
        earlier[phase.id] = direct.union(*(earlier[name] for name in direct))
    return earlier


_HasEnded = Callable[[TurnKey], bool]


class TurnTable:
    """All turns of a scenario, and the progress of one run; no turn ends twice."""

    def __init__(self, scenario: Scenario) -> None:
        self._phases = scenario.phases
        self._earlier = earlier_phases(scenario)
        self._turns = {
            phase.id: tuple(TurnKey(phase.id, number, speaker) for number, speaker in phase.turns)
            for phase in scenario.phases
        }
        self._all = frozenset(turn for turns in self._turns.values() for turn in turns)
        # Number of leading turns that have ended, by phase; these are not scanned again.
        self._passed = dict.fromkeys(self._turns, 0)

    def __contains__(self, turn: TurnKey) -> bool:
        return turn in self._all

    def next(self, ended: Collection[TurnKey]) -> tuple[TurnKey, ...]:
        """Return the turns that may run now, including running ones; none after the last."""
        self._pass(self._passed, ended.__contains__)
        return tuple(self._due(self._passed, ended.__contains__))

    def has_ended(self, phase_id: str, ended: Collection[TurnKey]) -> bool:
        """Return whether all turns of a phase have ended, so that it can be judged."""
        self._pass(self._passed, ended.__contains__)
        return self._is_over(phase_id, self._passed)

    def upcoming(self, ended: Collection[TurnKey], count: int) -> tuple[TurnKey, ...]:
        """Return up to `count` turns that follow those that may run now, soonest first."""
        due = self.next(ended)
        passed, done = dict(self._passed), set[TurnKey]()
        coming: list[TurnKey] = []

        def has_ended(turn: TurnKey) -> bool:
            return turn in done or turn in ended

        while due and len(coming) < count:
            done.update(due)
            self._pass(passed, has_ended)
            due = tuple(self._due(passed, has_ended))
            coming += due
        return tuple(coming[:count])

    def _pass(self, passed: dict[str, int], has_ended: _HasEnded) -> None:
        for phase_id, turns in self._turns.items():
            at = passed[phase_id]
            while at < len(turns) and has_ended(turns[at]):
                at += 1
            passed[phase_id] = at

    def _is_over(self, phase_id: str, passed: dict[str, int]) -> bool:
        return passed[phase_id] == len(self._turns[phase_id])

    def _due(self, passed: dict[str, int], has_ended: _HasEnded) -> Iterator[TurnKey]:
        over = {phase_id for phase_id in self._turns if self._is_over(phase_id, passed)}
        for phase in self._phases:
            if phase.id not in over and self._earlier[phase.id] <= over:
                yield from self._due_in(phase, passed[phase.id], has_ended)

    def _due_in(self, phase: Phase, at: int, has_ended: _HasEnded) -> Iterator[TurnKey]:
        turns = self._turns[phase.id]
        yield turns[at]
        if phase.order is TurnOrder.PARALLEL:
            for further in range(at + 1, len(turns)):
                if turns[further].round != turns[at].round:
                    return
                if not has_ended(turns[further]):
                    yield turns[further]
