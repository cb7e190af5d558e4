"""Prompts that continue what an agent remembers: its owner makes them of what is to come."""

from dataclasses import replace
from functools import partial

import aiohttp

from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import FabricError, RejectedError, RetryLaterError
from fabric.ids import NodeName
from fabric.limits import TURN_BODY_BYTES_MAX, TURN_ITEMS_MAX
from fabric.turn.generation import APPEND_PATH, ContinuedPrompt
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.large_work import run_sized
from router.prompt import Prompt, raw_prompt
from router.turn_request import TurnRequest


class ContinuedPrompts:
    """Asks owners."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def of(self, turn: TurnRequest) -> tuple[str, Prompt] | None:
        """Return an agent's model and its next prompt; None for one that remembers nothing.

        Raise RetryLaterError where its owner does not answer.
        """
        assert turn.key is not None, "agents are continued by name"
        if not self._fleet.directory.holdings(turn.key):
            return None
        owner = self._fleet.require_owner(turn.key).node
        try:
            told = await self._ask(owner, turn)
        except NodeLostError:
            message = f"{owner}, which owns the agent, does not answer"
            raise RetryLaterError(message, retry_after_s=2.0, code="agents_unknown") from None
        member = self._fleet.membership.find(owner)
        if told.text is None or member is None or member.view is None:
            return None
        return member.view.model, replace(raw_prompt(told.text), extends=True)

    async def _ask(self, owner: NodeName, turn: TurnRequest) -> ContinuedPrompt:
        link, asked = self._fleet.link(owner), turn.request(epoch=0)
        body = await run_sized(turn.tenant, turn.prompt.bytes_count, partial(dump_json, asked))
        answer = await link.post(APPEND_PATH, body, {"content-type": "application/json"})
        try:
            raw = await answer.content.read()
        except (aiohttp.ClientError, OSError) as error:
            text = f"the connection to {owner} broke ({type(error).__name__})"
            raise NodeLostError(text) from None
        finally:
            answer.close()
        try:
            plain = parse_json(raw, items_max=TURN_ITEMS_MAX)
            told: ContinuedPrompt = from_plain(ContinuedPrompt, plain, "continued")
        except RejectedError as error:
            text = f"{owner} continued wrongly: {error.message}"
            raise FabricError(text, code="bad_node_answer") from None
        if told.text is not None and len(told.text) > TURN_BODY_BYTES_MAX:
            text = f"{owner} continued with more than a prompt may be"
            raise FabricError(text, code="bad_node_answer")
        return told
