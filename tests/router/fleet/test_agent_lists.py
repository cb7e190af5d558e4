"""A node's list, read in parts and by changes, equals its whole list."""

import pytest

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.errors import FabricError
from router.fleet.agent_lists import read_list
from router.fleet.directory import Directory
from tests.router.fleet.test_directory import KEY, listing, noted, view

pytestmark = pytest.mark.anyio


class Link:
    """A node with prepared answers."""

    name = "a"

    def __init__(self, *parts):
        self.parts, self.asked = list(parts), []

    async def call(self, message, kind):
        assert isinstance(message, ListAgents)
        assert kind is AgentList
        self.asked.append((message.incarnation, message.since))
        return self.parts.pop(0)


def part(changes, *agents, since=0, gone=(), more=False, incarnation=1):
    told = tuple(AgentSketch(view("a", 1, agent=agent), ()) for agent in agents)
    names = tuple(AgentName("t", agent) for agent in gone)
    return AgentList("a", incarnation, changes, told, since, names, more)


def names(agents):
    return [item.view.agent for item in agents.agents]


async def test_parts_are_put_together():
    link = Link(
        part(3, "x", "y", "z", more=True),
        part(6, "y", "v", since=3, gone=("x",), more=True),
        part(8, "x", since=6, gone=("z",)),
    )
    read = await read_list(link)

    assert link.asked == [(0, 0), (1, 3), (1, 6)]
    assert names(read) == ["y", "v", "x"]
    assert (read.since, read.changes, read.more) == (0, 8, False)


async def test_changes_are_asked_for_by_what_is_known():
    link = Link(part(9, "x", since=5, gone=("y",)))
    read = await read_list(link, (1, 5))

    assert link.asked == [(1, 5)]
    assert (names(read), read.gone, read.since) == (["x"], (AgentName("t", "y"),), 5)


async def test_a_node_that_restarts_between_parts_is_asked_again_later():
    link = Link(part(3, "x", more=True), part(2, "x", incarnation=2))

    with pytest.raises(FabricError, match="has no end"):
        await read_list(link)


async def test_changes_replace_what_they_name_and_nothing_else():
    directory = Directory()
    directory.apply(listing("a", view("a", 1), view("a", 1, agent="bob"), changes=5), 1.0)
    gone = directory.apply(part(6, "carol", since=5, gone=("bob", "stranger")), 2.0)

    assert gone == {("t", "bob")}
    assert directory.agents("t") == ["alice", "carol"]
    assert not directory.needs_whole_list("a")


async def test_changes_after_a_gap_are_ignored():
    directory = Directory()
    directory.apply(listing("a", view("a", 1), changes=5), 1.0)

    assert directory.apply(part(9, "carol", since=7, gone=("alice",)), 2.0) == set()
    assert directory.agents("t") == ["alice"]
    assert directory.needs_whole_list("a")
    directory.apply(listing("a", view("a", 1, agent="carol"), changes=9), 3.0)
    assert directory.agents("t") == ["carol"]
    assert not directory.needs_whole_list("a")


async def test_a_noted_agent_that_is_never_listed_is_detected():
    """It started and ended before the last list, and its start was noted late."""
    directory = Directory()
    directory.apply(listing("a", changes=5), 1.0)
    directory.note(KEY, noted("a", 1, 2.0))
    directory.apply(part(6, "bob", since=5), 1.5)
    assert not directory.needs_whole_list("a"), "it was asked before"

    directory.apply(part(7, "bob", since=6), 3.0)
    assert directory.needs_whole_list("a")
    directory.apply(listing("a", view("a", 1, agent="bob"), changes=7), 4.0)
    assert directory.agents("t") == ["bob"]
    assert not directory.needs_whole_list("a")


async def test_a_noted_agent_that_is_listed_raises_no_doubt():
    directory = Directory()
    directory.apply(listing("a", changes=5), 1.0)
    directory.note(KEY, noted("a", 1, 2.0))
    directory.apply(part(6, "alice", since=5), 3.0)

    assert not directory.needs_whole_list("a")
