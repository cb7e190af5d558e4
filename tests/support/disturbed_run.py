"""A scenario performed over HTTP while its agents' nodes are killed and its agents moved.

In each phase, as far as its turns allow: one agent is moved between turns; the node of one is
killed in the middle of an answer; one is moved in the middle of an answer.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.scenario.fabric_client import AgentAnswer, Question
from router.scenario.run_events import AgentAsked, RunEvent
from router.scenario.scenario import Scenario
from router.scenario.series import ArmRun, SeriesPlan
from router.scenario.transcript import TurnKey
from tests.support.http_fabric_client import HttpFabricClient, has_words
from tests.support.local_fabric import LocalFabric
from tests.support.performed import performed
from tests.support.process_fabric import ProcessFabric

BETWEEN, KILL, MOVE = "moved between turns", "killed in mid-answer", "moved in mid-answer"
MOVED_S = 60.0


@dataclass(frozen=True)
class NemesisAction:
    """An action on an agent in a phase, and its node: the killed one, or the new one."""

    phase: str
    kind: str
    agent: str
    node: str


@dataclass
class Nemesis:
    """A kill and two moves in each phase; a killed node restarts at once or a phase later."""

    fabric: ProcessFabric
    scenario: Scenario
    first_stays_away: bool = False
    actions: list[NemesisAction] = field(default_factory=list)
    repeated_answers: list[str] = field(default_factory=list)  # turns answered more than once
    misplaced_turns: list[NemesisAction] = field(default_factory=list)  # not served by the target
    answers: list[tuple[str, str, str]] = field(default_factory=list)  # phase, agent, node
    _turns: dict[str, TurnKey] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _killed_nodes: dict[str, str] = field(default_factory=dict)  # node, and the phase of its death
    _answered: set[tuple[str, int]] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)

    def watch(self, ids: dict[str, str]) -> Callable[[RunEvent], None]:
        """Record which agent answers in which turn."""
        self._names = {agent_id: agent for agent, agent_id in ids.items()}

        def on_event(event: RunEvent) -> None:
            if isinstance(event, AgentAsked):
                self._turns[event.turn.speaker] = event.turn

        return on_event

    def before_turn(self, agent_id: str) -> None:
        """Revive nodes killed in another phase, and move an agent between its turns."""
        agent = self._names[agent_id]
        phase = self._turns[agent].phase
        with self._lock:
            for node in [n for n, killed_in in self._killed_nodes.items() if killed_in != phase]:
                self._revive(node)
            has_answered = any(name == agent for _, name, _ in self.answers)
            if has_answered and self._is_due(phase, BETWEEN):
                shown = self.fabric.http.get(f"/v1/agents/{agent_id}").json()
                self._move(phase, BETWEEN, agent_id, shown.get("owner"))

    def in_mid_answer(self, agent_id: str, node: str) -> threading.Thread | None:
        """Take the action that is due after the first words of an answer arrived from a node."""
        agent = self._names[agent_id]
        phase = self._turns[agent].phase
        with self._lock:
            self._record_misplaced_turn(agent, node)
            if self._is_due(phase, KILL):
                self._kill(phase, agent_id, node)
            elif self._is_due(phase, MOVE):
                moving = threading.Thread(target=self._move, args=(phase, MOVE, agent_id, node))
                moving.start()
                return moving
        return None

    def _record_misplaced_turn(self, agent: str, node: str) -> None:
        """Record a turn that the target of the agent's move does not serve, though it is alive."""
        for action in reversed(self.actions):
            if action.agent == agent or action.kind == KILL:
                if action.agent == agent and action.kind == BETWEEN and action.node != node:
                    self.misplaced_turns.append(action)
                return

    def after_turn(self, agent_id: str, messages_count: int, node: str) -> None:
        """Record an answer."""
        with self._lock:
            agent = self._names[agent_id]
            self.answers.append((self._turns[agent].phase, agent, node))
            if (agent_id, messages_count) in self._answered:
                self.repeated_answers.append(f"{agent_id}, {messages_count} messages")
            self._answered.add((agent_id, messages_count))

    def forget(self, action: NemesisAction) -> None:
        """Repeat an action that came too late."""
        with self._lock:
            self.actions.remove(action)

    def last(self, agent_id: str, kind: str) -> NemesisAction | None:
        agent = self._names[agent_id]
        matching = (d for d in self.actions if (d.agent, d.kind) == (agent, kind))
        return next((d for d in matching if d.phase == self._turns[agent].phase), None)

    def _is_due(self, phase: str, kind: str) -> bool:
        return not any((d.phase, d.kind) == (phase, kind) for d in self.actions)

    def _kill(self, phase: str, agent_id: str, node: str) -> None:
        if node in self._killed_nodes or len(self._killed_nodes) + 2 > len(self.fabric.services):
            return
        self.fabric.kill(node)
        self._killed_nodes[node] = phase
        self.actions.append(NemesisAction(phase, KILL, self._names[agent_id], node))
        number = [each.id for each in self.scenario.phases].index(phase)
        if bool(number % 2) is self.first_stays_away:
            threading.Thread(target=self._revive, args=(node,)).start()

    def _revive(self, node: str) -> None:
        with self._lock:
            if node in self._killed_nodes:
                self.fabric.revive(node)
                del self._killed_nodes[node]

    def _move(self, phase: str, kind: str, agent_id: str, node: str | None) -> None:
        others = [n for n in self.fabric.services if n not in {node, *self._killed_nodes}]
        for to in others:
            path = f"/v1/agents/{agent_id}/migrate"
            receipt = self.fabric.http.post(path, json={"to": to}, timeout=MOVED_S)
            if receipt.status_code == 200 and receipt.json()["to"] == to:
                self.actions.append(NemesisAction(phase, kind, self._names[agent_id], to))
                return


@dataclass(frozen=True)
class DisturbedClient(HttpFabricClient):
    """HTTP client that calls the nemesis before and during each answer."""

    nemesis: Nemesis

    async def ask(self, question: Question) -> AgentAnswer:
        await asyncio.to_thread(self.nemesis.before_turn, question.agent)
        answer = await super().ask(question)
        self.nemesis.after_turn(question.agent, len(question.messages), answer.figures.node)
        return answer

    def _chunks(self, question: Question, response: Any) -> Iterator[dict[str, Any]]:
        """Call the nemesis at an answer's first words; a move must end before its last words."""
        node, moving, has_begun, is_late = response.headers["x-macfabric-node"], None, False, False
        for chunk in super()._chunks(question, response):
            if any(has_words(choice["delta"]) for choice in chunk.get("choices") or ()):
                if not has_begun:
                    has_begun, moving = True, self.nemesis.in_mid_answer(question.agent, node)
                is_late = moving is not None and moving.is_alive()
            yield chunk
        if moving is not None:
            moving.join(MOVED_S)
            action = self.nemesis.last(question.agent, MOVE)
            if action is not None and is_late:
                self.nemesis.forget(action)


def perform(
    fabric: LocalFabric,
    scenario: Scenario,
    folder: Path,
    name: str,
    nemesis: Nemesis | None = None,
) -> ArmRun:
    """Perform a scenario once, with its own agents and journal."""
    plan = SeriesPlan(scenario, name, "digest", namespace=name)
    if nemesis is None:
        return performed(plan, HttpFabricClient(fabric.http, fabric.model_name), folder)
    on_event = nemesis.watch(plan.ids(plan.arms[0]))
    speaker = DisturbedClient(fabric.http, fabric.model_name, nemesis)
    return performed(plan, speaker, folder, on_event)
