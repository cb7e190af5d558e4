"""The directory publishes every change of an agent once."""

from router.events import (
    AgentCreated,
    AgentErased,
    AgentEvicted,
    AgentFound,
    AgentMoved,
)
from router.fleet.directory import Directory
from tests.router.fleet.test_directory import (
    KEY,
    REPLICA,
    SEALED,
    apply_list,
    listing,
    noted_view,
    view,
)


def directory():
    published = []
    return Directory(published.append), published


def test_agents_in_first_list_of_a_node_are_found_not_created():
    known, published = directory()
    apply_list(known, listing("a", view("a", 3)), 1.0)
    apply_list(known, listing("a", view("a", 3), view("a", 1, agent="bob"), changes=2), 2.0)
    known.restart("a")
    apply_list(known, listing("a", view("a", 3), view("a", 1, agent="bob"), incarnation=2), 3.0)

    assert published == [AgentFound(KEY, "a", 3), AgentCreated(("t", "bob"), "a", 1)]


def test_turn_creates_agent_once_despite_later_list():
    known, published = directory()
    known.note(KEY, noted_view("a", 1, 1.0))
    apply_list(known, listing("a", view("a", 1)), 2.0)
    assert published == [AgentCreated(KEY, "a", 1)]


def test_move_is_one_event_in_any_order_of_reports():
    known, published = directory()
    known.note(KEY, noted_view("a", 1, 1.0))
    apply_list(known, listing("a", view("a", 1, SEALED)), 2.0)
    known.note(KEY, noted_view("b", 2, 3.0))
    known.note(KEY, noted_view("a", 2, 4.0, REPLICA))
    apply_list(known, listing("b", view("b", 2)), 5.0)
    assert published[1:] == [AgentMoved(KEY, "a", "b", 2)]

    known.note(KEY, noted_view("b", 3, 6.0, REPLICA))  # stepped down, and then taken over
    known.note(KEY, noted_view("a", 4, 7.0))
    assert published[2:] == [AgentMoved(KEY, "b", "a", 4)]


def test_agents_missing_from_list_are_evicted():
    known, published = directory()
    known.note(KEY, noted_view("a", 1, 1.0))
    known.note(KEY, noted_view("b", 1, 1.0, REPLICA))
    apply_list(known, listing("b"), 2.0)
    apply_list(known, listing("a"), 3.0)
    known.note(KEY, noted_view("a", 2, 4.0))

    assert published[1:] == [
        AgentEvicted(KEY, "b", replica=True),
        AgentEvicted(KEY, "a", replica=False),
        AgentCreated(KEY, "a", 2),
    ]


def test_erasure_is_one_event_and_no_eviction():
    known, published = directory()
    known.note(KEY, noted_view("a", 1, 1.0))
    known.floor = lambda _: 100
    known.note_erased(KEY)
    known.note_erased(KEY)
    known.forget(KEY, "a")
    known.note(KEY, noted_view("b", 101, 2.0))

    assert published[1:] == [AgentErased(KEY), AgentCreated(KEY, "b", 101)]
