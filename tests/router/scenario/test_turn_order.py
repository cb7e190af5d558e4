"""Which turns may run, from the transcript alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.scenario.reader import read_scenario
from router.scenario.transcript import TurnKey
from router.scenario.turn_order import TurnTable, earlier_phases
from tests.router.scenario.small_scenario import runs, small

FORKED = b"""\
scenario: s
agents: {a: {}, b: {}, c: {}, d: {}}
phases:
  - {id: p, agents: [a, b], order: parallel}
  - {id: q, agents: [c], rounds: 2, after: []}
  - {id: r, agents: [d], after: [q], ask: {d: [null]}}
  - {id: s, agents: [a, c], after: [p, q, r]}
"""


def names(turns):
    return [f"{turn.phase}{turn.round}{turn.speaker}" for turn in turns]


def due_turns(scenario):
    ended = set()
    while due := TurnTable(scenario).next(ended):
        yield names(due)
        ended.add(due[0])


def by_definition(scenario, ended):
    """Yield the turns that may run: the first open turn of each begun phase, or its round's."""
    open_turns = {
        p.id: [t for n, s in p.turns if (t := TurnKey(p.id, n, s)) not in ended]
        for p in scenario.phases
    }
    for phase in scenario.phases:
        if open_turns[phase.id] and not any(
            open_turns[name] for name in earlier_phases(scenario)[phase.id]
        ):
            first = open_turns[phase.id][0]
            of_round = [turn for turn in open_turns[phase.id] if turn.round == first.round]
            yield from of_round if phase.order == "parallel" else [first]


def test_turns_run_in_sequence_or_in_parallel():
    found = [(due[0], len(due)) for due in due_turns(small())]
    assert found == [
        ("room_a1warden", 1),
        ("room_a1marco", 1),
        ("room_a2warden", 1),
        ("room_a2marco", 1),
        ("room_b1warden", 2),
        ("room_b1danny", 1),
        ("room_b2warden", 2),
        ("room_b2danny", 1),
        ("yard1marco", 1),
        ("yard1danny", 1),
    ]


def test_phases_without_common_agents_run_in_parallel():
    assert list(due_turns(read_scenario(FORKED, "s"))) == [
        ["p1a", "p1b", "q1c"],
        ["p1b", "q1c"],
        ["q1c"],
        ["q2c"],
        ["s1a"],
        ["s1c"],
    ]


def test_upcoming_speakers_are_listed():
    scenario = small()
    ended = {TurnKey("room_a", 1, "warden")}
    assert names(TurnTable(scenario).upcoming(ended, 3)) == [
        "room_a2warden",
        "room_a2marco",
        "room_b1warden",
    ]
    assert not TurnTable(scenario).has_ended("room_a", ended)
    assert len(TurnTable(scenario).upcoming(ended, 100)) == 8


@settings(max_examples=40)
@given(runs(), st.data())
def test_resumed_run_has_the_same_turns(run, data):
    scenario, transcript = run
    every = {TurnKey(p.id, n, s) for p in scenario.phases for n, s in p.turns}
    assert {u.turn for u in transcript} == every
    ended = {u.turn for u in transcript[: data.draw(st.integers(0, len(transcript)))]}
    left = every - ended
    followed = TurnTable(scenario)
    while due := followed.next(ended):
        assert due == TurnTable(scenario).next(ended) == tuple(by_definition(scenario, ended))
        assert followed.upcoming(ended, 5) == TurnTable(scenario).upcoming(ended, 5)
        assert set(due) <= left
        phase = scenario.phase(due[0].phase)
        assert len({(t.phase, t.round) for t in due}) == 1
        assert len(due) == 1 or phase.order == "parallel"
        ended |= {data.draw(st.sampled_from(due))}
        left -= ended
    assert left == set()
    assert all(TurnTable(scenario).has_ended(p.id, ended) for p in scenario.phases)
