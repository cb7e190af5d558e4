"""Thoughts that a template leaves out are still in the record: directives reach them there."""

import pytest

from fabric.control.directive_calls import DirectAgent
from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.record.spans import WantedSpan
from fabric.settings import RESTORE_OPTION
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought
from tests.support.scripted_answers import scripted
from tests.support.services import TENANT, call, running
from tests.support.template_shapes import SHAPES, write_shape

SECRET = "velvet-badger"
THOUGHT = f"The code is {SECRET}, I will not say it."
NAME = AgentId("one")


@pytest.fixture
def shape():
    return SHAPES["stripped_by_template"]


@pytest.fixture
def talking(tmp_path, shape):
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        yield Talk(Driver(service, shape, script, True), echo=drop_thought)


def direct(talk, **where):
    span = WantedSpan(
        "directives[0]", OperationId("hidden-1"), EditMode.FORGET, where.pop("new", ""), **where
    )
    return call(talk.driver.service, DirectAgent(TENANT, NAME, spans=(span,)), AgentView)


def record(talk):
    return talk.driver.service.node.resources.table.get((TENANT, NAME)).manifest


def has_secret(talk):
    found = record(talk)
    return SECRET in found.text or SECRET in found.provenance.answers


def hide(talk):
    """Let the agent think the secret, and take a turn whose prompt omits the thought."""
    talk.ask(thought=THOUGHT)
    talk.ask()
    assert SECRET not in record(talk).text
    assert SECRET in record(talk).provenance.answers


BY_TEXT = {"text": SECRET}
OF_MESSAGE = {"text": SECRET, "first": 2, "last": 2}
WHOLE = {"first": 2, "last": 2, "new": None}


@pytest.mark.parametrize("where", [BY_TEXT, OF_MESSAGE, WHOLE], ids=["text", "its text", "whole"])
@pytest.mark.parametrize(
    "echo", [drop_thought, lambda answer: answer], ids=["dropped", "sent back"]
)
def test_hidden_thought_is_forgotten(talking, where, echo):
    talking.echo = echo
    hide(talking)
    direct(talking, **where)
    for _ in range(2):
        talking.ask()
        assert not has_secret(talking)
        (directive,) = record(talking).directives
        assert directive.is_applied
        assert directive.dropped.chars >= len(SECRET)
    if where is not WHOLE:
        assert THOUGHT.replace(SECRET, "") in record(talking).provenance.answers


@pytest.mark.parametrize("where", [BY_TEXT, WHOLE, {**WHOLE, "new": "cleared"}])
def test_hidden_thought_is_forgotten_without_thought_restoration(talking, where):
    hide(talking)
    talking.driver.options = {RESTORE_OPTION: False}
    direct(talking, **where)
    talking.ask()
    assert not has_secret(talking)


def test_thought_is_not_stored_without_thought_restoration(talking):
    """A stored thought could not be forgotten by its text."""
    talking.driver.options = {RESTORE_OPTION: False}
    talking.ask(thought=THOUGHT)
    assert has_secret(talking)
    talking.ask()
    assert not has_secret(talking)
    with pytest.raises(FabricError, match="no message that can be edited has that text"):
        direct(talking, **BY_TEXT)


def test_text_also_in_a_hidden_thought_is_ambiguous(talking):
    talking.ask(f"Keep the code {SECRET}.", thought=THOUGHT)
    talking.ask()
    with pytest.raises(FabricError, match="occurs 2 times"):
        direct(talking, **BY_TEXT)
    direct(talking, **BY_TEXT, is_every=True)
    talking.ask()
    assert not has_secret(talking)


@pytest.mark.parametrize("shape", [SHAPES["thought_opened"]])
def test_shown_call_is_not_counted_as_hidden(talking):
    talking.tools = TOOLS
    talking.ask(call=("read", {"path": SECRET}))
    (use,) = talking.messages[-1]["tool_calls"]
    talking.messages.append({"role": "tool", "tool_call_id": use["id"], "content": "done"})
    talking.answer()
    assert has_secret(talking)
    direct(talking, **BY_TEXT)
    talking.ask()
    assert not has_secret(talking)
