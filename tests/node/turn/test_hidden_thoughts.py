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
def start_talk(tmp_path, shape):
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


def with_hidden_thoughts(talk):
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
def test_hidden_thought_is_forgotten(start_talk, where, echo):
    start_talk.echo = echo
    with_hidden_thoughts(start_talk)
    direct(start_talk, **where)
    for _ in range(2):
        start_talk.ask()
        assert not has_secret(start_talk)
        (directive,) = record(start_talk).directives
        assert directive.is_applied
        assert directive.dropped.chars >= len(SECRET)
    if where is not WHOLE:
        assert THOUGHT.replace(SECRET, "") in record(start_talk).provenance.answers


@pytest.mark.parametrize("where", [BY_TEXT, WHOLE, {**WHOLE, "new": "cleared"}])
def test_hidden_thought_is_forgotten_without_thought_restoration(start_talk, where):
    with_hidden_thoughts(start_talk)
    start_talk.driver.options = {RESTORE_OPTION: False}
    direct(start_talk, **where)
    start_talk.ask()
    assert not has_secret(start_talk)


def test_thought_is_not_stored_without_thought_restoration(start_talk):
    """A stored thought could not be forgotten by its text."""
    start_talk.driver.options = {RESTORE_OPTION: False}
    start_talk.ask(thought=THOUGHT)
    assert has_secret(start_talk)
    start_talk.ask()
    assert not has_secret(start_talk)
    with pytest.raises(FabricError, match="no message that can be edited has that text"):
        direct(start_talk, **BY_TEXT)


def test_text_also_in_a_hidden_thought_is_ambiguous(start_talk):
    start_talk.ask(f"Keep the code {SECRET}.", thought=THOUGHT)
    start_talk.ask()
    with pytest.raises(FabricError, match="occurs 2 times"):
        direct(start_talk, **BY_TEXT)
    direct(start_talk, **BY_TEXT, is_every=True)
    start_talk.ask()
    assert not has_secret(start_talk)


@pytest.mark.parametrize("shape", [SHAPES["thought_opened"]])
def test_shown_call_is_not_counted_as_hidden(start_talk):
    start_talk.tools = TOOLS
    start_talk.ask(call=("read", {"path": SECRET}))
    (use,) = start_talk.messages[-1]["tool_calls"]
    start_talk.messages.append({"role": "tool", "tool_call_id": use["id"], "content": "done"})
    start_talk.answer()
    assert has_secret(start_talk)
    direct(start_talk, **BY_TEXT)
    start_talk.ask()
    assert not has_secret(start_talk)
