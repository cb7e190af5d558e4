"""Omitted or respelled parts of earlier answers are restored in place."""

import json
import threading
from dataclasses import replace
from types import MappingProxyType

import pytest

from fabric.ids import AgentId, OperationId, TenantId
from fabric.limits import ANSWERS_BYTES_MAX
from fabric.settings import RESTORE_OPTION
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from fabric.turn.messages import Message, MessageRole, ToolUse, template_form
from node.agents import indexes
from node.dialect.template_messages import TemplateTraits, adapt_messages
from node.prompt import earlier_answers as restoring
from node.prompt.earlier_answers import (
    NO_OPTIONS,
    KnownAnswers,
    MessagePlaces,
    conversation_answers,
    locate_messages,
    restore_answers,
)
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought
from tests.support.conversations import read_messages
from tests.support.samples import sample
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, write_shape

QUESTION = read_messages(
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
)
WRITTEN = '{"what":"y",  "path": "x"}'


def remember(answers, messages, answer, redacted=MappingProxyType({})):
    return conversation_answers(answers, messages, answer, MessagePlaces(messages), redacted)


CALL = ToolUse("read", WRITTEN, "call_own")
ANSWER = Message(MessageRole.ASSISTANT, ("\n\nSo.",), reasoning="Hm.", uses=(CALL,))
ANSWERS = remember({}, QUESTION, ANSWER)
RESULT = Message(MessageRole.TOOL, ("z",), result_of="call_other")


def request_of(*messages, **options):
    return GenerateRequest(
        OperationId("operation-1"),
        TenantId("t"),
        Identity(IdentityKind.CONTENT),
        Sampling(),
        (*QUESTION, *messages),
        template_options=options,
    )


def returned_answer(**changes):
    """Return the answer as a client sends it, which drops its thought."""
    use = replace(CALL, arguments=json.loads(WRITTEN))
    return replace(ANSWER, **{"reasoning": None, "uses": (use,), **changes})


def restore(request, answers=ANSWERS, defaults=NO_OPTIONS, messages=None):
    request = replace(request, messages=messages or request.messages)
    found = locate_messages(request, defaults)
    at = {place: answers[place] for place in found.answer_places if place in answers}
    return restore_answers(found, KnownAnswers(at, answers))


@pytest.mark.parametrize(
    ("message", "note"),
    [
        (returned_answer(), "; restored reasoning: 1"),
        (returned_answer(texts=("So.",)), "; restored reasoning: 1; restored spelling: 1"),
        (
            returned_answer(uses=(ToolUse("read", {"path": "x", "what": "y"}, "call_other"),)),
            "; restored reasoning: 1; restored spelling: 1",
        ),
        (returned_answer(reasoning="Hm.", texts=("So. ",)), "; restored spelling: 1"),
    ],
    ids=["as it was", "trimmed", "adapt_messages otherwise", "its thought sent back"],
)
def test_omitted_parts_of_an_answer_are_restored(message, note):
    result = restore(request_of(message))
    (answer,) = result.request.messages[len(QUESTION) :]

    assert (answer.reasoning, answer.texts, answer.uses[0].id) == ("Hm.", ("\n\nSo.",), "call_own")
    assert list(answer.uses[0].arguments) == ["what", "path"]
    assert result.note == note


def test_text_templates_get_arguments_as_the_model_wrote_them():
    """Other templates print the object in their own way, with keys in the model's order."""
    (answer,) = restore(request_of(returned_answer())).request.messages[len(QUESTION) :]
    for is_text, arguments in ((True, WRITTEN), (False, {"what": "y", "path": "x"})):
        (message,) = adapt_messages([template_form(answer)], TemplateTraits(text_arguments=is_text))
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_tool_results_follow_restored_call_ids():
    other = ToolUse("read", json.loads(WRITTEN), "call_other")
    result = restore(
        request_of(returned_answer(uses=(other,)), RESULT, replace(RESULT, result_of="call_else"))
    )
    assert [message.result_of for message in result.request.messages[-2:]] == [
        "call_own",
        "call_else",
    ]


@pytest.mark.parametrize("ids", [("a", "a"), ("a", None)], ids=["the same twice", "one without"])
def test_ambiguous_call_ids_are_unchanged(ids):
    answer = replace(ANSWER, uses=(CALL, replace(CALL, id="call_second")))
    uses = tuple(ToolUse("read", json.loads(WRITTEN), own) for own in ids)
    result = restore(request_of(returned_answer(uses=uses), RESULT), remember({}, QUESTION, answer))
    assert tuple(use.id for use in result.request.messages[-2].uses) == ids


@pytest.mark.parametrize(
    "messages",
    [
        [returned_answer(texts=("Else.",))],
        [returned_answer(uses=())],
        [
            Message(MessageRole.USER, ("And?",)),
            returned_answer(uses=(replace(CALL, id="call_other"),)),
        ],
    ],
    ids=["other text", "no call", "another place"],
)
def test_unmatched_answers_are_unchanged(messages):
    request = request_of(*messages)
    assert restore(request).request == request
    assert restore(request).note == ""


def test_thought_of_the_client_is_kept():
    result = restore(request_of(returned_answer(reasoning="My own.")))
    assert result.request.messages[-1].reasoning == "My own."


def test_thought_stripped_by_a_policy_is_not_restored():
    result = restore(request_of(returned_answer(is_stripped=True, texts=("So.",))))
    assert result.request.messages[-1].reasoning is None
    assert result.note == "; restored spelling: 1", "all other parts are restored"


def test_restore_option_is_honored_and_hidden_from_templates():
    refused = restore(
        request_of(returned_answer(), **{RESTORE_OPTION: False, "enable_thinking": True})
    )
    assert refused.request == request_of(returned_answer(), enable_thinking=True)
    assert restore(request_of(returned_answer(), **{RESTORE_OPTION: True})).note
    assert not restore(request_of(returned_answer()), defaults={RESTORE_OPTION: False}).note


def test_remembered_answers_are_bounded_and_newest():
    answers, messages = {}, list(QUESTION)
    for turn in range(40):
        answer = Message(MessageRole.ASSISTANT, (f"{turn}",), reasoning=f"{turn:05}" * 1_000)
        answers = remember(answers, messages, answer)
        messages += [replace(answer, reasoning=None), Message(MessageRole.USER, ("On.",))]
    assert sum(known.size_bytes for known in answers.values()) <= ANSWERS_BYTES_MAX
    assert [known.reasoning[:5] for known in answers.values()][-1] == "00039"
    result = restore(request_of(*messages[2:]), answers)
    size_bytes = max(known.size_bytes for known in answers.values())
    assert result.note == f"; restored reasoning: {ANSWERS_BYTES_MAX // size_bytes}"


@pytest.mark.parametrize("is_redacted", [False, True])
def test_parts_removed_by_directives_are_not_remembered(is_redacted):
    """The answer stays known by its place and its call's id, without thought and arguments."""
    left = replace(ANSWER, reasoning=None, uses=(replace(CALL, arguments={}),))
    redacted = {len(QUESTION): left} if is_redacted else {}
    later = Message(MessageRole.ASSISTANT, ("\n\nNext.",))
    answers = remember(ANSWERS, (*QUESTION, returned_answer(), RESULT), later, redacted=redacted)
    (known,) = (each for each in answers.values() if each.calls)
    assert (known.reasoning, known.calls[0].arguments) == (
        ("", "") if is_redacted else ("Hm.", WRITTEN)
    )
    assert known.calls[0].id == "call_own"


def test_answer_with_invalid_text_is_not_remembered():
    assert remember({}, QUESTION, replace(ANSWER, reasoning="half \ud800")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", sample([False, True], True), ids=["no ids", "ids"])
def test_answers_are_restored_after_restart_and_in_other_conversations(tmp_path, has_ids):
    """The answer is restored from its record, also for a conversation that diverged after it."""
    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script:
        with running(tmp_path, str(model)) as service:
            driver = Driver(service, shape, script, has_ids)
            talk = Talk(driver, tools=TOOLS, echo=drop_thought)
            talk.ask(call=("read", {"path": "x"}))
        history = talk.messages
        script.end = None  # a node tests itself as it starts
        with running(tmp_path, str(model)) as service:
            driver.service = service
            for name, result in (("one", "first"), ("two", "second")):
                call = history[-1]["tool_calls"][0]["id"]
                more = {"role": "tool", "tool_call_id": call, "content": result}
                Talk(driver, name, tools=TOOLS, messages=[*history, more]).answer()
    first, *others = driver.turns
    assert len({turn.agent for turn in driver.turns}) == 2
    assert all(turn.cached > first.prompt + 20 for turn in others)


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", sample([False, True], True), ids=["no ids", "ids"])
def test_loop_of_a_client_dropping_thoughts_extends_the_record(tmp_path, has_ids):
    """Each step computes what is new; with the option off, also its last answer again."""
    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    lost = {}
    with scripted() as script, running(tmp_path, str(model)) as service:
        for restores in (True, False):
            tenant = TenantId(f"tenant-{restores}".lower())
            options = {RESTORE_OPTION: restores}
            driver = Driver(service, shape, script, has_ids, tenant, options=options)
            Talk(driver, tools=TOOLS, echo=drop_thought).work(3)
            steps = zip(driver.turns, driver.turns[1:], strict=False)
            lost[restores] = [later.cached - earlier.prompt for earlier, later in steps]
            assert len({turn.agent for turn in driver.turns}) == 1
    assert all(tokens > 0 for tokens in lost[True])  # the answer, too, was reused
    assert all(tokens <= 0 for tokens in lost[False])


def test_remembered_answers_are_read_once_and_hashed_off_the_loop(tmp_path, monkeypatch):
    """The messages are hashed on an encoder thread; the new answer at its end."""
    hashed, read, add, decode_answers = [], [], restoring._extend, indexes.decode_answers

    def record_and_add(digest, message):
        hashed.append((threading.current_thread().name.split("_")[0], message.role))
        return add(digest, message)

    def record_and_decode(spelled):
        read.append(spelled)
        return decode_answers(spelled)

    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, shape, script, has_ids=True)
        talk = Talk(driver, tools=TOOLS, echo=drop_thought)
        monkeypatch.setattr(restoring, "_extend", record_and_add)
        monkeypatch.setattr(indexes, "decode_answers", record_and_decode)
        for turn in range(3):
            hashed.clear()
            read.clear()
            talk.ask(f"Question {turn}?")
            *before, (_, last) = hashed
            assert {thread for thread, _ in before} == {"encode"}
            assert [role for _, role in before] == [
                MessageRole(each["role"]) for each in talk.messages[:-1]
            ]
            assert last is MessageRole.ASSISTANT
            assert len(read) == 1


@pytest.mark.parametrize("spaced", ["one", "two"])
def test_agents_do_not_get_each_others_spelling(tmp_path, spaced):
    """Two agents' answers differ in white space only; each keeps its own."""
    shape = SHAPES["chatml"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    texts = {name: "So it is.  " if name == spaced else "So it is." for name in ("one", "two")}
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, shape, script, has_ids=True)
        talks = {name: Talk(driver, name) for name in texts}
        for name, talk in talks.items():
            talk.ask("Why?", text=texts[name], thought="")
        for name, talk in talks.items():
            talk.ask("And?", text="", thought="")
            record = service.node.resources.table.get((driver.tenant, AgentId(name))).manifest
            assert ("So it is.  " in record.text) == (name == spaced)


def test_restored_spelling_is_stored_in_the_new_agents_record(tmp_path):
    """A conversation continued under another name then uses its own record."""
    shape = SHAPES["chatml"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, shape, script, has_ids=True)
        first = Talk(
            driver, "one", echo=lambda answer: {**answer, "content": answer["content"].strip()}
        )
        first.ask("Why?", text="So it is.  ", thought="")
        other = Talk(driver, "two", messages=first.messages)
        for question in ("And?", "What else?"):
            other.ask(question, text="", thought="")
            assert (
                "So it is.  "
                in service.node.resources.table.get((driver.tenant, AgentId("two"))).manifest.text
            )


@pytest.mark.parametrize("depth", [100, 900, 990, 995, 1_000, 1_000_000])
def test_deeply_nested_arguments_are_accepted(depth):
    """A client's JSON text may be nested to any depth."""
    deep = "[" * depth + "]" * depth
    use = replace(CALL, arguments=deep)
    found = locate_messages(request_of(returned_answer(uses=(use,)), RESULT))
    known = remember({}, found.request.messages, replace(ANSWER, uses=(use,)))
    result = restore(found.request, known)
    assert result.request.messages[len(QUESTION)].uses[0].arguments == deep
