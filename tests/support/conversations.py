"""Conversations as OpenAI's clients write them and as chat templates read them."""

from fabric.codec import dump_json, from_plain, parse_json
from fabric.ids import OperationId, TenantId
from fabric.limits import TURN_ITEMS_MAX
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from fabric.turn.messages import template_form
from router.http.fields import Fields
from router.openai.chat_messages import parse_messages


def said(messages):
    """Read messages as the API does."""
    return tuple(parse_messages(Fields({"messages": messages})))


def as_templates_get_it(prompt):
    """Send a prompt to a node, and return what its template is given."""
    identity = Identity(IdentityKind.CONTENT)
    sent = GenerateRequest(
        OperationId("operation-1"), TenantId("t"), identity, Sampling(), prompt.messages
    )
    come = from_plain(GenerateRequest, parse_json(dump_json(sent), TURN_ITEMS_MAX))
    return [template_form(message) for message in come.messages]
