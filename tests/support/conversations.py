"""Conversations as OpenAI's clients write them and as chat templates read them."""

from fabric.codec import dump_json, from_plain, parse_json
from fabric.ids import OperationId, TenantId
from fabric.json_items import ItemCount
from fabric.limits import JSON_ITEMS_MAX, TURN_ITEMS_MAX
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from fabric.turn.messages import template_form
from router.openai.chat_request import MESSAGES


def read_messages(messages):
    """Read messages as the API does."""
    argument_items = ItemCount(JSON_ITEMS_MAX)
    return tuple(m.message(argument_items) for m in MESSAGES.read(messages, "messages"))


def template_messages(prompt):
    """Send a prompt to a node, and return the messages that its template receives."""
    identity = Identity(IdentityKind.CONTENT)
    request = GenerateRequest(
        OperationId("operation-1"), TenantId("t"), identity, Sampling(), prompt.messages
    )
    received = from_plain(GenerateRequest, parse_json(dump_json(request), TURN_ITEMS_MAX))
    return [template_form(message) for message in received.messages]
