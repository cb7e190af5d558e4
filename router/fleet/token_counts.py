"""How many tokens a prompt has: any node that serves the model can say."""

from fabric.errors import RetryLaterError
from fabric.turn.generation import COUNT_PATH, TokenCount
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.fleet.prompt_questions import ask_about_prompt
from router.turn_request import TurnRequest


class TokenCounts:
    """Asks nodes, one after the other until one answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def count(self, turn: TurnRequest) -> int:
        """Return the tokens of a turn's prompt; raise RejectedError where it is none."""
        fleet = self._fleet
        for member in fleet.membership.members:
            serves = member.view is not None and member.view.model == turn.model
            if serves and fleet.is_alive(member.name):
                try:
                    told = await ask_about_prompt(fleet, member.name, COUNT_PATH, turn, TokenCount)
                except NodeLostError:
                    continue
                return told.tokens
        message = "no node that serves the model answers"
        raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
