"""Prompts that continue what an agent remembers: its owner makes them of what is to come."""

from dataclasses import replace

from fabric.errors import RetryLaterError
from fabric.turn.generation import APPEND_PATH, ContinuedPrompt
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.fleet.prompt_questions import ask_about_prompt
from router.prompt import Prompt, raw_prompt
from router.turn_request import TurnRequest


class ContinuedPrompts:
    """Asks owners."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def of(self, turn: TurnRequest) -> tuple[str, Prompt] | None:
        """Return an agent's model and its next prompt; None for one that remembers nothing.

        Raise RetryLaterError where its owner does not answer, or may not have joined yet.
        """
        assert turn.key is not None, "agents are continued by name"
        if not self._fleet.directory.holdings(turn.key):
            self._fleet.discovery.require_reports(turn.key[1])
            return None
        owner = self._fleet.require_owner(turn.key).node
        try:
            told = await ask_about_prompt(self._fleet, owner, APPEND_PATH, turn, ContinuedPrompt)
        except NodeLostError:
            message = f"{owner}, which owns the agent, does not answer"
            raise RetryLaterError(message, retry_after_s=2.0, code="agents_unknown") from None
        member = self._fleet.membership.find(owner)
        if told.text is None or member is None or member.view is None:
            return None
        return member.view.model, replace(raw_prompt(told.text), extends=True)
