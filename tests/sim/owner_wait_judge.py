"""Judge of restarts: a turn may be served elsewhere only after waiting as long as a prefill takes.

The agent's owner has not yet reported to the router. If another node serves the turn, and the owner
reports the agent before the prompt could have been computed, the turn should have waited.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

from fabric.record.manifest import OwnerState
from router.fleet.agent_lists import AgentReports
from router.limits import OWNER_WAIT_S_MAX

SLACK_S = 0.5  # of the router's own polls and messages


@dataclass(frozen=True)
class WaitingTurn:
    """A turn of an agent whose owner had not reported to the router."""

    key: tuple
    owner: str  # the node that acknowledged it last
    epoch: int
    router: int  # the router's incarnation
    due_s: float  # when a prefill of the prompt would have ended


class OwnerWaitJudge:
    """Comparison of owners' reports with turns that other nodes served."""

    def __init__(self, world):
        self._world = world
        self._reported = {}  # (router's incarnation, node): the agents of its first list
        self._elsewhere = []
        self.waited_count = 0  # turns served by an owner that reported after they were sent
        self.elsewhere_count = 0

    def watch_turn(self, key, owner, epoch, messages):
        """Return a turn to be sent, or None if its router can serve it at once."""
        router = self._world.router
        if router.services is None:
            return None
        fleet = router.services.fleet
        is_known = fleet.directory.unerased_holdings(key) or fleet.directory.start_reservation(key)
        if is_known or (router.incarnation, owner) in self._reported:
            return None
        tokens = sum(len(each["content"]) for each in messages)
        speeds = [host._tokens_per_s for host in self._world.nodes.values()]
        speeds += [m.view.prefill_tokens_per_s for m in fleet.membership.members if m.view]
        due_s = self._world.loop.now_s + min(tokens / max(speeds), OWNER_WAIT_S_MAX)
        return WaitingTurn(key, owner, epoch, router.incarnation, due_s)

    def check_admitted(self, waiting_turn, admitted):
        """Record where a turn was served."""
        if waiting_turn is None or waiting_turn.router != self._world.router.incarnation:
            return
        if admitted.node == waiting_turn.owner:
            self.waited_count += 1
            return
        lists = [keys for (life, _), keys in self._reported.items() if life == waiting_turn.router]
        if any(waiting_turn.key in keys for keys in lists):
            return  # another node claims the agent, too, or has a copy: faster than waiting
        self.elsewhere_count += 1
        self._elsewhere.append(waiting_turn)

    def _on_list(self, agents):
        router = self._world.router.incarnation
        owned = {
            item.view.key: item.view.epoch
            for item in agents.agents
            if item.view.state is OwnerState.OWNED
        }
        held = {item.view.key for item in agents.agents}
        self._reported.setdefault((router, agents.node), held)
        now_s = self._world.loop.now_s
        for waiting_turn in self._elsewhere:
            is_owners = (waiting_turn.router, waiting_turn.owner) == (router, agents.node)
            has_agent = owned.get(waiting_turn.key, 0) >= waiting_turn.epoch
            if is_owners and has_agent and now_s < waiting_turn.due_s - SLACK_S:
                self._world.fail(
                    f"{waiting_turn.key} was served elsewhere, and {waiting_turn.owner} reported"
                    f" it {waiting_turn.due_s - now_s:.1f} s before its prompt could be computed"
                )
        self._elsewhere = [each for each in self._elsewhere if each.owner != agents.node]

    @contextlib.contextmanager
    def taps(self):
        """Record the agent lists that the router receives."""
        on_list = AgentReports.on_list

        async def listed(reports, agents, requested_s):
            services = self._world.router.services
            if services is not None and services.fleet.membership._reports is reports:
                self._on_list(agents)
            await on_list(reports, agents, requested_s)

        with mock.patch.object(AgentReports, "on_list", listed):
            yield
