"""Which turns may run now, given those that have ended: a run is resumed from nothing else."""

from collections.abc import Collection, Iterator

from router.scenario.precedence import earlier_phases
from router.scenario.scenario import Phase, Scenario, TurnOrder
from router.scenario.utterance import TurnKey


def next_turns(scenario: Scenario, ended: Collection[TurnKey]) -> tuple[TurnKey, ...]:
    """Return all turns that may run at this moment; none once the scenario has ended.

    Those that are under way are among them until they have ended.
    """
    earlier = earlier_phases(scenario)
    over = {phase.id for phase in scenario.phases if not any(_open_turns(phase, ended))}
    begun = (phase for phase in scenario.phases if earlier[phase.id] <= over)
    return tuple(turn for phase in begun for turn in _due(phase, ended))


def phase_has_ended(scenario: Scenario, phase_id: str, ended: Collection[TurnKey]) -> bool:
    """Say whether a phase has no turn left; its expectations can be judged then."""
    return not any(_open_turns(scenario.phase(phase_id), ended))


def turns_to_come(
    scenario: Scenario, ended: Collection[TurnKey], count: int
) -> tuple[TurnKey, ...]:
    """Return the turns behind those that may run now, soonest first: whom to prefetch."""
    done = set(ended)
    found: list[TurnKey] = []
    due = next_turns(scenario, done)
    while due and len(found) < count:
        done.update(due)
        due = next_turns(scenario, done)
        found += due
    return tuple(found[:count])


def _open_turns(phase: Phase, ended: Collection[TurnKey]) -> Iterator[TurnKey]:
    for number, speaker in phase.turns:
        turn = TurnKey(phase.id, number, speaker)
        if turn not in ended:
            yield turn


def _due(phase: Phase, ended: Collection[TurnKey]) -> Iterator[TurnKey]:
    first: TurnKey | None = None
    for turn in _open_turns(phase, ended):
        first = first or turn
        if turn.round != first.round:
            return
        yield turn
        if phase.order is TurnOrder.IN_TURN:
            return
