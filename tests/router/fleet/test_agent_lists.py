"""A node's list, read in parts and by changes, equals its whole list."""

import asyncio
from dataclasses import replace

import pytest

from fabric.control.agent_at import AgentName
from fabric.control.change_calls import COLUMNS, AgentChanges, AgentRow, ListChanges
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.errors import FabricError
from router.fleet import agent_lists
from router.fleet.agent_lists import AgentReports, read_list
from router.fleet.directory import Directory
from router.limits import AGENTS_PER_STEP, COLLECTED_AGENTS_MAX
from router.placement.sketch_index import SketchIndex
from tests.router.fleet.test_directory import KEY, apply_list, listing, noted_view, view
from tests.router.placement.test_sketch_index import chain

pytestmark = pytest.mark.anyio


class Link:
    """A node with prepared answers."""

    name = "a"

    def __init__(self, *parts):
        self.parts, self.requests = list(parts), []

    async def call(self, message, kind):
        assert isinstance(message, ListAgents)
        assert kind is AgentList
        self.requests.append((message.incarnation, message.since))
        return self.parts.pop(0)


def part(changes, *agents, since=0, gone=(), more=False, incarnation=1):
    sketches = tuple(AgentSketch(view("a", 1, agent=agent), ()) for agent in agents)
    names = tuple(AgentName("t", agent) for agent in gone)
    return AgentList("a", incarnation, changes, sketches, since, names, more)


def names(agents):
    return [item.view.agent for item in agents.agents]


async def test_list_parts_are_combined():
    link = Link(
        part(3, "x", "y", "z", more=True),
        part(6, "y", "v", since=3, gone=("x",), more=True),
        part(8, "x", since=6, gone=("z",)),
    )
    read = await read_list(link)

    assert link.requests == [(0, 0), (1, 3), (1, 6)]
    assert names(read) == ["y", "v", "x"]
    assert (read.since, read.changes, read.more) == (0, 8, False)


async def test_changes_are_requested_since_known_version():
    link = Link(part(9, "x", since=5, gone=("y",)))
    read = await read_list(link, (1, 5))

    assert link.requests == [(1, 5)]
    assert (names(read), read.gone, read.since) == (["x"], (AgentName("t", "y"),), 5)


async def test_restart_between_parts_is_an_error():
    link = Link(part(3, "x", more=True), part(2, "x", incarnation=2))

    with pytest.raises(FabricError, match="has no end"):
        await read_list(link)


async def test_changes_update_only_agents_they_name():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1), view("a", 1, agent="bob"), changes=5), 1.0)
    gone = apply_list(directory, part(6, "carol", since=5, gone=("bob", "stranger")), 2.0)

    assert gone == [("t", "bob")]
    assert directory.agents("t") == ["alice", "carol"]
    assert not directory.needs_whole_list("a")


async def test_changes_after_a_gap_are_ignored():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1), changes=5), 1.0)

    assert apply_list(directory, part(9, "carol", since=7, gone=("alice",)), 2.0) == set()
    assert directory.agents("t") == ["alice"]
    assert directory.needs_whole_list("a")
    apply_list(directory, listing("a", view("a", 1, agent="carol"), changes=9), 3.0)
    assert directory.agents("t") == ["carol"]
    assert not directory.needs_whole_list("a")


async def test_noted_agent_missing_from_lists_requires_whole_list():
    """The agent started and ended before the last list, and its start was noted late."""
    directory = Directory()
    apply_list(directory, listing("a", changes=5), 1.0)
    directory.note(KEY, noted_view("a", 1, 2.0))
    apply_list(directory, part(6, "bob", since=5), 1.5)
    assert not directory.needs_whole_list("a"), "the list was requested before the note"

    apply_list(directory, part(7, "bob", since=6), 3.0)
    assert directory.needs_whole_list("a")
    apply_list(directory, listing("a", view("a", 1, agent="bob"), changes=7), 4.0)
    assert directory.agents("t") == ["bob"]
    assert not directory.needs_whole_list("a")


async def test_noted_agent_that_is_listed_needs_no_whole_list():
    directory = Directory()
    apply_list(directory, listing("a", changes=5), 1.0)
    directory.note(KEY, noted_view("a", 1, 2.0))
    apply_list(directory, part(6, "alice", since=5), 3.0)

    assert not directory.needs_whole_list("a")


def reports():
    directory, sketches = Directory(), SketchIndex()
    return directory, sketches, AgentReports(directory, sketches)


async def test_long_list_yields_to_loop_and_never_overwrites_newer_state():
    directory, _, applied = reports()
    count = 5 * AGENTS_PER_STEP
    agents = [view("a", 1, agent=f"agent-{number:04}") for number in range(count)]
    long = asyncio.create_task(applied.on_list(listing("a", *agents, changes=count), 1.0))
    await asyncio.sleep(0)
    first = len(directory.agents("t"))
    assert 0 < first < count
    last = view("a", 7, agent=agents[-1].agent)
    changed = part(count + 1, since=count)
    changed = replace(changed, agents=(AgentSketch(last, ()),))
    await applied.on_list(changed, 2.0)
    await long

    assert len(directory.agents("t")) == count
    assert directory.owner(last.key).epoch == 7
    await applied.on_list(listing("a", agents[0], changes=count + 2), 3.0)
    assert directory.agents("t") == ["agent-0000"]


async def test_sketch_suffix_is_appended_to_known_prefix():
    directory, sketches, applied = reports()
    whole = chain(1, 2, 3, 4)

    async def listed(changes, sketch, kept=None, since=0):
        agent = AgentSketch(replace(view("a", 1, agent="x"), revision=changes), sketch, None, kept)
        await applied.on_list(replace(part(changes, since=since), agents=(agent,)), float(changes))

    await listed(1, whole[:2])
    await listed(2, whole[2:], (2, whole[1]), since=1)
    assert sketches.matches("t", whole)["a"].pieces_count == 4
    assert not directory.needs_whole_list("a")
    await listed(3, (7,), (4, whole[2]), since=2)
    assert directory.needs_whole_list("a"), "its earlier pieces differ"
    await listed(4, whole)
    assert not directory.needs_whole_list("a")


class RowLink(Link):
    async def call(self, message, kind):
        assert isinstance(message, ListChanges)
        assert message.columns == COLUMNS
        self.requests.append((message.incarnation, message.since))
        listed = self.parts.pop(0)
        rows = tuple(AgentRow.of(item) for item in listed.agents)
        more = (listed.gone or None, listed.more or None)
        return AgentChanges(listed.incarnation, listed.changes, listed.since, rows, *more)


async def test_list_parts_in_rows_are_combined():
    whole = chain(1, 2, 3)
    parts = (
        part(3, "x", "y", more=True),
        part(6, "x", "z", since=3, gone=("y",)),
    )
    first, last = (
        replace(each, agents=(replace(each.agents[0], sketch=pieces, kept=kept), each.agents[1]))
        for each, pieces, kept in zip(
            parts, (whole[:2], whole[2:]), (None, (2, whole[1])), strict=True
        )
    )
    read = await read_list(RowLink(first, last), in_rows=True)

    assert names(read) == ["x", "z"]
    assert (read.agents[0].sketch, read.agents[0].kept) == (whole, None)
    assert (read.node, read.since, read.changes, read.more) == ("a", 0, 6, False)
    only = RowLink(last)
    read = await read_list(only, (1, 3), in_rows=True)
    assert (read.agents[0].sketch, read.agents[0].kept) == (whole[2:], (2, whole[1]))
    assert only.requests == [(1, 3)]


async def test_garbage_collections_skip_agents_of_first_lists(monkeypatch):
    frozen = []
    monkeypatch.setattr(agent_lists, "exclude_from_collections", lambda: frozen.append(True))
    _, _, applied = reports()
    half = [view("a", 1, agent=f"agent-{number}") for number in range(COLLECTED_AGENTS_MAX // 2)]

    await applied.on_list(listing("a", *half, changes=1), 1.0)
    assert not frozen
    await applied.on_list(listing("b", *(replace(each, node="b") for each in half)), 1.0)
    assert len(frozen) == 1
    for changes in (2, 3):
        await applied.on_list(listing("a", *half, changes=changes), 2.0)
    assert len(frozen) == 1, "a later list replaces few objects"
