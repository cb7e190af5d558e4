"""Wait of a turn for expected nodes that may own its agent and have not joined.

    owner reported      the turn goes there
    no node is awaited  it starts on any node
    time is up          the same: recomputing the prompt takes no longer than the wait did

The time is the router's estimate of the prefill, after the queues of the nodes that could do it, at
most OWNER_WAIT_S_MAX. Of many turns whose time is up at once, the next one sees the first one in
such a queue, and keeps waiting. A conversation without an answer is new, so it waits only if it
names its agent.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fabric.turn.messages import MessageRole
from router.fleet import snapshots
from router.fleet.fleet import Fleet
from router.limits import OWNER_WAIT_S_MAX
from router.placement.placement import is_continued, recompute_s
from router.prompt import Prompt
from router.turn_request import TurnRequest

_LOG = logging.getLogger("macfabric.router.turns")


@dataclass(slots=True)
class AwaitedNodes:
    """Nodes that a turn waits for before its admission, shown in its stream."""

    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"waiting for {', '.join(self.nodes)}" if self.nodes else "starting"


class OwnerWait:
    """Waits of turns while the owner of their agent may still join."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def wait(self, turn: TurnRequest, since_s: float, waiting: AwaitedNodes) -> None:
        """Wait until the turn's owner has reported, or the wait since `since_s` is too long."""
        discovery = self._fleet.discovery
        if not discovery.may_learn_agents() or self._is_wait_pointless(turn):
            return
        began_s = self._fleet.clock.monotonic_s()
        awaited = discovery.awaited_nodes()
        waiting.nodes = awaited
        watch, left_s = self._watch(turn), self._left_s(turn, since_s)
        try:
            while not (is_reported := await discovery.wait_for_owner(watch, left_s)):
                left_s = self._left_s(turn, since_s)
                if left_s <= 0 or not discovery.awaited_nodes():
                    break
        finally:
            waiting.nodes = ()
        alias = self._fleet.alias(turn.key) if turn.key else "without a name"
        waited_s = self._fleet.clock.monotonic_s() - began_s
        outcome = "its owner joined" if is_reported else "no owner joined"
        _LOG.info("agent %s: waited %.1f s for %s; %s", alias, waited_s, awaited, outcome)

    def _left_s(self, turn: TurnRequest, since_s: float) -> float:
        """Return for how long a turn that came at `since_s` still waits, by the queues of now."""
        estimate_s = recompute_s(snapshots.facts_of(turn), snapshots.of_turn(self._fleet, turn))
        return since_s + min(estimate_s, OWNER_WAIT_S_MAX) - self._fleet.clock.monotonic_s()

    def _watch(self, turn: TurnRequest) -> Callable[[], bool]:
        """Return a cheap `_is_wait_pointless` that compares content only after a new report."""
        lists_count, is_pointless = self._fleet.membership.lists_count, False

        def check_owner() -> bool:
            nonlocal lists_count, is_pointless
            latest = self._fleet.membership.lists_count
            if turn.key is not None or latest != lists_count:
                lists_count, is_pointless = latest, self._is_wait_pointless(turn)
            return is_pointless

        return check_owner

    def _is_wait_pointless(self, turn: TurnRequest) -> bool:
        """Return whether waiting is pointless: the owner is known, or cannot exist."""
        key, directory = turn.key, self._fleet.directory
        if key is not None:
            owner = (
                directory.owner(key)
                or directory.start_reservation(key)
                or directory.released_owner(key)
            )
            return owner is not None
        if not turn.is_kept or not _may_continue(turn.prompt):
            return True
        return is_continued(snapshots.facts_of(turn), snapshots.of_turn(self._fleet, turn))


def _may_continue(prompt: Prompt) -> bool:
    """Return whether a prompt may continue a stored conversation, found by its content."""
    if prompt.messages is None:
        return bool(prompt.sketch)
    has_answer = any(message.role is MessageRole.ASSISTANT for message in prompt.messages)
    return has_answer and bool(prompt.sketch)
