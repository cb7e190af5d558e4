"""Lists of agents: read from a node part by part, and applied to the directory and the sketches."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from fabric.control.agent_at import AgentName
from fabric.control.change_calls import COLUMNS, AgentChanges, ListChanges
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.control.versions import BAD_NODE_ANSWER
from fabric.errors import FabricError, RejectedError
from fabric.hosting.process import exclude_from_collections
from fabric.ids import NodeName
from router.fleet.directory import Directory
from router.fleet.node_client import NodeLink
from router.limits import (
    AGENTS_PER_STEP,
    COLLECTED_AGENTS_MAX,
    LIST_PAGES_MAX,
    ROWS_PER_STEP,
)
from router.placement.sketch_index import SketchIndex


class AgentReports:
    """Updates of the directory and the sketches by the lists that nodes send."""

    def __init__(self, directory: Directory, sketches: SketchIndex) -> None:
        self._directory = directory
        self._sketches = sketches
        self._collected_count = 0  # agents of first lists, which garbage collections walk

    async def on_list(self, agents: AgentList, requested_s: float) -> None:
        """Apply a node's list, requested at `requested_s` by the router's clock.

        A long one is applied in parts, between which others get the event loop.
        """
        node, directory = agents.node, self._directory
        is_first = not directory.has_list(node)
        is_applied, absent = directory.begin_list(agents), directory.keys_absent_from(agents)
        for number, item in enumerate(agents.agents):
            if number % AGENTS_PER_STEP == AGENTS_PER_STEP - 1:
                await asyncio.sleep(0)
            absent.pop(item.view.key, None)
            if is_applied:
                directory.put_listed(node, item.view, requested_s, is_first_list=is_first)
            self._put_sketch(agents, item)
        if is_applied:
            for tenant, agent in directory.end_list(agents, absent, requested_s):
                self._sketches.remove(tenant, node, agent)
        if is_first:
            self._exclude_from_collections(len(agents.agents))

    def _exclude_from_collections(self, agents_count: int) -> None:
        """Exclude new agents from garbage collections once they are many.

        They live as long as their node. A collection walks whole indexes of them: with 100,000,
        5 ms for a young one, after a single change.
        """
        self._collected_count += agents_count
        if self._collected_count >= COLLECTED_AGENTS_MAX:
            self._collected_count = 0
            exclude_from_collections()

    def _put_sketch(self, agents: AgentList, item: AgentSketch) -> None:
        view, sketches = item.view, self._sketches
        name, tag = (view.tenant, agents.node, view.agent), (agents.incarnation, view.epoch)
        if view.epoch <= self._directory.floor(view.key):
            return  # erased, but not removed yet: no conversation continues it
        # Missing while the first turn runs, which was sketched when sent.
        if item.kept is not None:
            known = (*tag, view.revision)
            if not sketches.extend(*name, item.kept, item.sketch, known, item.form):
                self._directory.doubt(agents.node)  # only its whole list has the sketch
        elif item.sketch:
            sketches.put(*name, item.sketch, (*tag, view.revision), form=item.form)

    def needs_whole_list(self, node: NodeName) -> bool:
        """Return whether a node's whole list is needed."""
        return self._directory.needs_whole_list(node)

    def on_restart(self, node: NodeName) -> None:
        """Accept lists of a node's new incarnation, whose change counter restarts."""
        self._directory.restart(node)


async def free_in_steps(items: list[Any]) -> None:
    """Empty a list that holds the last references to its items: all at once block for 130 ms."""
    while items:
        del items[-AGENTS_PER_STEP:]
        await asyncio.sleep(0)


async def read_list(
    link: NodeLink, known: tuple[int, int] = (0, 0), *, in_rows: bool = False
) -> AgentList:
    """Return the changes after `known` (incarnation, changes), or all; raise FabricError.

    A node that supports it is read `in_rows`, with the last pieces of each sketch.
    """
    part = partial(_rows if in_rows else _part, link)
    first = last = await part(*known)
    agents, removed = dict[AgentName, AgentSketch](), dict[AgentName, None]()
    for _ in range(LIST_PAGES_MAX):
        for name in last.gone:
            agents.pop(name, None)
            removed[name] = None
        for number, item in enumerate(last.agents):
            if number % AGENTS_PER_STEP == AGENTS_PER_STEP - 1:
                await asyncio.sleep(0)
            name = AgentName(*item.view.key)
            agents[name] = _join_sketch(agents.pop(name, None), item)
            removed.pop(name, None)
        if not last.more:
            sketches, names = tuple(agents.values()), list(agents)
            agents.clear()
            await free_in_steps(names)
            return replace(
                first, changes=last.changes, agents=sketches, gone=tuple(removed), more=False
            )
        last = await part(last.incarnation, last.changes)
        if last.incarnation != first.incarnation or not last.since:
            break  # the node restarted its list
    message = f"the list of {link.name} has no end"
    raise FabricError(message, code=BAD_NODE_ANSWER)


async def _part(link: NodeLink, incarnation: int, since: int) -> AgentList:
    return await link.call(ListAgents(incarnation, since), AgentList)


async def _rows(link: NodeLink, incarnation: int, since: int) -> AgentList:
    changes = await link.call(ListChanges(incarnation, since, COLUMNS), AgentChanges)
    rows, agents = list(reversed(changes.agents)), list[AgentSketch]()
    changes = replace(changes, agents=())  # so that each row is freed once it is read
    try:
        while rows:
            if len(agents) % ROWS_PER_STEP == ROWS_PER_STEP - 1:
                await asyncio.sleep(0)
            agents.append(rows.pop().to_agent_sketch())
    except RejectedError as error:
        message = f"{link.name} sent an invalid list: {error.message}"
        raise FabricError(message, code=BAD_NODE_ANSWER) from None
    version, removed = (changes.incarnation, changes.changes), changes.gone or ()
    return AgentList(link.name, *version, tuple(agents), changes.since, removed, bool(changes.more))


def _join_sketch(earlier: AgentSketch | None, later: AgentSketch) -> AgentSketch:
    """Return an agent of a later part of a list, whose sketch may continue an earlier part's."""
    if earlier is None or later.kept is None or earlier.kept is not None:
        return later
    count, last = later.kept
    if not 0 < count <= len(earlier.sketch) or earlier.sketch[count - 1] != last:
        return later
    return replace(later, sketch=(*earlier.sketch[:count], *later.sketch), kept=None)
