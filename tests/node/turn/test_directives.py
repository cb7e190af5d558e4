"""Directives change how messages read in every later turn until undone."""

from dataclasses import replace

import pytest

from fabric.control.directive_calls import DirectAgent
from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.limits import DIRECTIVE_BYTES_MAX, DIRECTIVES_MAX
from fabric.record.directed_messages import edit_messages
from fabric.record.directive import Directive
from fabric.record.hashed_text import hash_text
from fabric.record.message_positions import message_digest
from fabric.turn.messages import Message, MessageRole, ToolUse
from node.limits import DIRECTIVES_BYTES_MAX
from node.tiers.disk_budget import record_bytes
from tests.support.agent_traffic import words
from tests.support.services import TENANT, ask, call, migrate, running
from tests.support.tiny_models import ONE_LAYER, write_model

NAME = AgentId("a")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


LONG = [words(10 + i, 36) for i in range(5)]


def history(*texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": words(1, 40)}, *messages]


def continued(messages, answer, question):
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]


def clearing(mode, text="[cleared]", operation="operation-1", of=LONG[1]):
    digest = message_digest(Message(MessageRole.ASSISTANT, (of,)))
    return Directive(OperationId(operation), mode, text, None, digest, 1.0)


def direct(service, *added, **more):
    return call(service, DirectAgent(TENANT, NAME, added, **more), AgentView)


def text_of(service):
    return service.node.resources.table.get((TENANT, NAME)).manifest.text


def test_amortized_message_is_replaced_and_later_rows_are_kept(tmp_path, model):
    with running(tmp_path, model) as service:
        first = ask(service, history(*LONG), agent="a")
        view = direct(service, clearing(EditMode.AMORTIZE))
        assert [d.is_applied for d in view.directives] == [False]
        messages = continued(history(*LONG), first.text, words(40, 12))
        reply = ask(service, messages, agent="a")
        assert reply.admitted.match == "edit"
        assert reply.admitted.cached_tokens > reply.admitted.prompt_tokens - 120
        assert LONG[1] not in text_of(service)
        assert "[cleared]" in text_of(service)
        agent = service.node.resources.table.get((TENANT, NAME))
        assert [d.is_applied for d in agent.view().directives] == [True]
        following = ask(service, continued(messages, reply.text, words(41, 9)), agent="a")
        assert following.admitted.cached_tokens > following.admitted.prompt_tokens - 120
        assert following.admitted.amortized_tokens > 0


def test_forgotten_message_leaves_no_trace(tmp_path, model):
    """The memory equals that of an agent without the message, even if `amortize` is requested."""
    with running(tmp_path, model) as service:
        first = ask(service, history(*LONG), agent="a")
        direct(service, clearing(EditMode.FORGET))
        messages = continued(history(*LONG), first.text, words(40, 12))
        reply = ask(service, messages, agent="a", edits=EditMode.AMORTIZE)
        assert reply.admitted.amortized_tokens == 0
    edited = [{**m, "content": "[cleared]"} if m["content"] == LONG[1] else m for m in messages]
    with running(tmp_path / "cold", model) as service:
        assert ask(service, edited, agent="a").text == reply.text


def test_exact_turn_overrides_an_amortized_directive(tmp_path, model):
    with running(tmp_path, model) as service:
        first = ask(service, history(*LONG), agent="a")
        direct(service, clearing(EditMode.AMORTIZE))
        messages = continued(history(*LONG), first.text, words(40, 12))
        reply = ask(service, messages, agent="a", edits=EditMode.FORGET)
        assert reply.admitted.amortized_tokens == 0
        assert "[cleared]" in text_of(service)


def test_directive_can_omit_a_message(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, history(*LONG), agent="a")
        direct(service, clearing(EditMode.AMORTIZE, None))
        ask(service, [*history(*LONG), {"role": "assistant", "content": "ok"}], agent="a")
        assert LONG[1] not in text_of(service)
        assert all(text in text_of(service) for text in (LONG[0], *LONG[2:]))
        assert "[cleared]" not in text_of(service)


def test_call_and_its_result_are_emptied_not_omitted():
    """Templates need either both or neither."""
    use = ToolUse("look", {}, "call-1")
    calling = Message(MessageRole.ASSISTANT, ("I look.",), uses=(use,))
    result_message = Message(MessageRole.TOOL, ("much",), result_of="call-1")
    operation = OperationId("operation-1")
    by_digest = Directive(operation, EditMode.FORGET, None, None, message_digest(calling))
    result = Directive(operation, EditMode.FORGET, None, "call-1")
    found = edit_messages([calling, result_message], [by_digest, result])
    assert found.messages == (replace(calling, texts=("",)), replace(result_message, texts=("",)))
    assert {replace(each, dropped=None) for each in found.matched} == {by_digest, result}
    assert sorted(each.dropped.chars for each in found.matched) == [4, 7]


@pytest.mark.parametrize("is_by_call_last", [True, False])
def test_newer_of_two_directives_for_a_message_applies(is_by_call_last):
    message = Message(MessageRole.TOOL, ("much",), result_of="call-1")
    by_digest = Directive(
        OperationId("operation-1"), EditMode.FORGET, "by text", None, message_digest(message)
    )
    result = Directive(OperationId("operation-2"), EditMode.FORGET, "by call", "call-1")
    found = edit_messages(
        [message], [by_digest, result] if is_by_call_last else [result, by_digest]
    )
    newer = result if is_by_call_last else by_digest
    assert found.messages == (replace(message, texts=(newer.replacement,)),)
    assert [replace(each, dropped=None) for each in found.matched] == [newer]


def test_directives_survive_restart_and_migration(tmp_path, model):
    with running(tmp_path / "a", model, name="node-a") as source:
        ask(source, history(*LONG), agent="a")
        direct(source, clearing(EditMode.AMORTIZE))
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        migrate(source, target, "a", 1)
        messages = [*history(*LONG), {"role": "assistant", "content": "ok"}]
        reply = ask(target, messages, agent="a", epoch=2)
        assert reply.admitted.match == "edit"
        assert "[cleared]" in text_of(target)


def test_operation_is_applied_once_and_undone_as_a_whole(tmp_path, model):
    with running(tmp_path, model) as service:
        first = ask(service, history(*LONG), agent="a")
        both = clearing(EditMode.AMORTIZE), clearing(EditMode.AMORTIZE, "other", of=LONG[3])
        assert len(direct(service, *both).directives) == 2
        revision = service.node.resources.table.get((TENANT, NAME)).manifest.revision
        assert len(direct(service, *both).directives) == 2
        assert service.node.resources.table.get((TENANT, NAME)).manifest.revision == revision
        ask(service, history(*LONG), agent="a")
        assert LONG[3] not in text_of(service)
        assert not direct(service, removed=(OperationId("operation-1"),)).directives
        messages = continued(history(*LONG), first.text, words(40, 12))
        ask(service, messages, agent="a")
        assert LONG[1] in text_of(service)
        assert LONG[3] in text_of(service)


def test_repeated_directive_stays_undone_after_its_removal(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, history(*LONG), agent="a")
        directive = clearing(EditMode.FORGET)
        assert direct(service, directive).directives
        assert not direct(service, removed=(directive.operation,)).directives
        revision = service.node.resources.table.get((TENANT, NAME)).manifest.revision
        assert not direct(service, directive).directives
        assert service.node.resources.table.get((TENANT, NAME)).manifest.revision == revision
        assert direct(service, clearing(EditMode.FORGET, operation="operation-2")).directives


def test_too_many_or_invalid_directives_are_refused(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, history(*LONG), agent="a")
        many = [
            clearing(EditMode.FORGET, operation=f"operation-{i}") for i in range(DIRECTIVES_MAX)
        ]
        direct(service, *many)
        for hostile in (
            replace(clearing(EditMode.AMORTIZE), message_digest=None),
            replace(clearing(EditMode.AMORTIZE), made_s=-1.0),
            clearing(EditMode.AMORTIZE, text="x" * (DIRECTIVE_BYTES_MAX + 1)),
        ):
            with pytest.raises(FabricError, match="a directive") as refused:
                direct(service, hostile)
            assert refused.value.status == 400
        with pytest.raises(FabricError, match="undo some"):
            direct(service, clearing(EditMode.FORGET, operation="operation-more"))
        view = direct(service, removes_all=True)
        assert not view.directives


def test_total_text_of_directives_is_bounded(tmp_path, model):
    """Directives are kept in memory and on disk, for every agent."""
    text, count = "x" * DIRECTIVE_BYTES_MAX, DIRECTIVES_BYTES_MAX // DIRECTIVE_BYTES_MAX
    with running(tmp_path, model) as service:
        ask(service, history(*LONG), agent="a")
        agent = service.node.resources.table.get((TENANT, NAME))
        before = record_bytes(agent.manifest)
        most = [clearing(EditMode.FORGET, text, f"operation-{i}") for i in range(count)]
        view = direct(service, *most)
        assert len(view.directives) == count
        assert record_bytes(agent.manifest) - before >= DIRECTIVES_BYTES_MAX
        with pytest.raises(FabricError, match="undo some"):
            direct(service, clearing(EditMode.FORGET, "x", "operation-more"))


def test_system_message_is_never_edited(tmp_path, model):
    system = words(1, 40)
    digest = message_digest(Message(MessageRole.SYSTEM, (system,)))
    with running(tmp_path, model) as service:
        ask(service, history(*LONG), agent="a")
        direct(service, Directive(OperationId("operation-1"), EditMode.FORGET, "x", None, digest))
        ask(service, history(*LONG), agent="a")
        assert system in text_of(service)


@pytest.mark.parametrize("nth", [0, 1])
def test_older_digests_match_messages_by_text_alone(nth):
    """Older digests omit calls, so all messages that only call have the same digest."""
    uses = [ToolUse("look", {"at": place}, f"call_{place}") for place in ("sky", "sea")]
    messages = [Message(MessageRole.ASSISTANT, ("",), uses=(use,)) for use in uses]
    older = message_digest(Message(MessageRole.ASSISTANT, ("",)))
    directive = replace(clearing(EditMode.FORGET), message_digest=older, nth=nth)
    emptied = [
        not message.uses[0].arguments for message in edit_messages(messages, [directive]).messages
    ]
    assert emptied == [number == nth for number in range(2)]


@pytest.mark.parametrize(
    "part",
    [
        {"reasoning": "I saw velvet there."},
        {"uses": (ToolUse("velvet_tool", {}, "call_1"),)},
        {"uses": (ToolUse("look", {}, "call_velvet"),)},
        {"uses": (ToolUse("look", {"velvet": 1}, "call_1"),)},
        {"uses": (ToolUse("look", {"at": [{"deep": "the velvet"}]}, "call_1"),)},
        {"uses": (ToolUse("look", '{"at": "velvet"}', "call_1"),)},
        {"uses": (ToolUse("look", "no object, velvet", "call_1"),)},
    ],
    ids=["thought", "name", "id", "key", "value", "text", "broken"],
)
def test_text_is_removed_from_every_part_of_an_answer(part):
    message = replace(Message(MessageRole.ASSISTANT, ("Done.",)), **part)
    result = Message(MessageRole.TOOL, ("z",), result_of="call_velvet", name="velvet_tool")
    directive = replace(
        clearing(EditMode.FORGET, "cotton"),
        message_digest=message_digest(message),
        nth=0,
        besides_text=hash_text("velvet"),
    )
    left = edit_messages([message, result], [directive]).messages
    assert "velvet" not in repr(left[0])
    assert "cotton" in repr(left[0])
    if part == {"uses": (ToolUse("look", {}, "call_velvet"),)}:
        assert left[1].result_of == left[0].uses[0].id
