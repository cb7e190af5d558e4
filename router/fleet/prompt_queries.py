"""Queries to nodes about one prompt, which run no turn."""

from dataclasses import replace
from functools import partial
from typing import TypeVar

from fabric.codec import dump_json, from_plain, parse_json
from fabric.control.versions import BAD_NODE_ANSWER
from fabric.errors import FabricError, RejectedError, RetryLaterError
from fabric.ids import NodeName
from fabric.limits import TURN_BODY_BYTES_MAX, TURN_ITEMS_MAX
from fabric.turn.generation import APPEND_PATH, COUNT_PATH, ContinuedPrompt, TokenCount
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.large_work import run_sized
from router.prompt import Prompt, raw_prompt
from router.turn_request import TurnRequest

T = TypeVar("T")


async def count_tokens(fleet: Fleet, turn: TurnRequest) -> int:
    """Return the tokens of a turn's prompt, by any node that serves the model.

    Raises RejectedError if the prompt is invalid, RetryLaterError if no node answers.
    """
    for member in fleet.membership.members:
        serves = member.view is not None and member.view.model == turn.model
        if serves and fleet.is_alive(member.name):
            try:
                return (await _query(fleet, member.name, COUNT_PATH, turn, TokenCount)).tokens
            except NodeLostError:
                continue
    message = "no node that serves the model answers"
    raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")


async def continued_prompt(fleet: Fleet, turn: TurnRequest) -> tuple[str, Prompt] | None:
    """Return an agent's model and the prompt that continues its memory; None if it has none.

    Raises RetryLaterError if its owner does not answer, or may not have joined yet.
    """
    assert turn.key is not None, "only a named agent is continued"
    if not fleet.directory.holdings(turn.key):
        fleet.discovery.require_reports(turn.key[1])
        return None
    owner = fleet.require_owner(turn.key).node
    try:
        reply = await _query(fleet, owner, APPEND_PATH, turn, ContinuedPrompt)
    except NodeLostError:
        message = f"node {owner}, which owns agent {turn.key[1]!r}, does not answer"
        raise RetryLaterError(message, retry_after_s=2.0, code="agents_unknown") from None
    member = fleet.membership.find(owner)
    if reply.text is None or member is None or member.view is None:
        return None
    prompt = replace(raw_prompt(reply.text), extends=True, plain_marks=reply.plain_marks)
    return member.view.model, prompt


async def _query(fleet: Fleet, node: NodeName, path: str, turn: TurnRequest, kind: type[T]) -> T:
    """Return a node's answer; raise its FabricError, or NodeLostError if it does not answer."""
    request = turn.request(epoch=0)
    body = await run_sized(turn.tenant, turn.prompt.bytes_count, partial(dump_json, request))
    link = fleet.link(node)
    answer = await link.post(path, body, {"content-type": "application/json"})
    raw = await link.read(answer, TURN_BODY_BYTES_MAX)
    try:
        reply: T = from_plain(kind, parse_json(raw, items_max=TURN_ITEMS_MAX), "answer")
    except RejectedError as error:
        text = f"{node} sent an invalid answer about a prompt: {error.message}"
        raise FabricError(text, code=BAD_NODE_ANSWER) from None
    return reply
