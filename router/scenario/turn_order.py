"""Which turns may run now, given those that have ended: a run is resumed from nothing else."""

from collections.abc import Callable, Collection, Iterator

from router.scenario.precedence import earlier_phases
from router.scenario.scenario import Phase, Scenario, TurnOrder
from router.scenario.utterance import TurnKey

_HasEnded = Callable[[TurnKey], bool]


class TurnTable:
    """All turns of a scenario; follows one run, whose ended turns only ever grow in number."""

    def __init__(self, scenario: Scenario) -> None:
        self._phases = scenario.phases
        self._earlier = earlier_phases(scenario)
        self._turns = {
            phase.id: tuple(TurnKey(phase.id, number, speaker) for number, speaker in phase.turns)
            for phase in scenario.phases
        }
        self._all = frozenset(turn for turns in self._turns.values() for turn in turns)
        # Of each phase: how many turns at its beginning have ended. None is looked at again.
        self._passed = dict.fromkeys(self._turns, 0)

    def __contains__(self, turn: TurnKey) -> bool:
        return turn in self._all

    def next(self, ended: Collection[TurnKey]) -> tuple[TurnKey, ...]:
        """Return all turns that may run at this moment; none once the scenario has ended.

        Those that are under way are among them until they have ended.
        """
        self._pass(self._passed, ended.__contains__)
        return tuple(self._due(self._passed, ended.__contains__))

    def has_ended(self, phase_id: str, ended: Collection[TurnKey]) -> bool:
        """Say whether a phase has no turn left; its expectations can be judged then."""
        self._pass(self._passed, ended.__contains__)
        return self._is_over(phase_id, self._passed)

    def to_come(self, ended: Collection[TurnKey], count: int) -> tuple[TurnKey, ...]:
        """Return the turns behind those that may run now, soonest first: whom to prefetch."""
        due = self.next(ended)
        passed, done = dict(self._passed), set[TurnKey]()
        found: list[TurnKey] = []

        def has_ended(turn: TurnKey) -> bool:
            return turn in done or turn in ended

        while due and len(found) < count:
            done.update(due)
            self._pass(passed, has_ended)
            due = tuple(self._due(passed, has_ended))
            found += due
        return tuple(found[:count])

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


def next_turns(scenario: Scenario, ended: Collection[TurnKey]) -> tuple[TurnKey, ...]:
    """Return all turns that may run at this moment, of a run that is not followed."""
    return TurnTable(scenario).next(ended)


def phase_has_ended(scenario: Scenario, phase_id: str, ended: Collection[TurnKey]) -> bool:
    """Say whether a phase has no turn left, of a run that is not followed."""
    return TurnTable(scenario).has_ended(phase_id, ended)


def turns_to_come(
    scenario: Scenario, ended: Collection[TurnKey], count: int
) -> tuple[TurnKey, ...]:
    """Return the turns behind those that may run now, of a run that is not followed."""
    return TurnTable(scenario).to_come(ended, count)
