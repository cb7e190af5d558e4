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
from node.prompt import restored_answers as restoring
from node.prompt.remembered_answers import conversation_answers
from node.prompt.restored_answers import (
    NO_OPTIONS,
    KnownAnswers,
    MessagePlaces,
    locate_messages,
    restore_answers,
)
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought
from tests.support.conversations import said
from tests.support.samples import sample
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, write_shape

ASKED = said([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
WRITTEN = '{"what":"y",  "path": "x"}'


def remember(answers, messages, answer, redacted=MappingProxyType({})):
    return conversation_answers(answers, messages, answer, MessagePlaces(messages), redacted)


CALL = ToolUse("read", WRITTEN, "call_own")
ANSWER = Message(MessageRole.ASSISTANT, ("\n\nSo.",), reasoning="Hm.", uses=(CALL,))
ANSWERS = remember({}, ASKED, ANSWER)
RESULT = Message(MessageRole.TOOL, ("z",), result_of="call_other")


def asking(*messages, **options):
    return GenerateRequest(
        OperationId("operation-1"),
        TenantId("t"),
        Identity(IdentityKind.CONTENT),
        Sampling(),
        (*ASKED, *messages),
        template_options=options,
    )


def sent(**changes):
    """Return the answer as a client sends it, which drops its thought."""
    use = replace(CALL, arguments=json.loads(WRITTEN))
    return replace(ANSWER, **{"reasoning": None, "uses": (use,), **changes})


def restored(request, answers=ANSWERS, told=NO_OPTIONS, messages=None):
    request = replace(request, messages=messages or request.messages)
    found = locate_messages(request, told)
    at = {place: answers[place] for place in found.answer_places if place in answers}
    return restore_answers(found, KnownAnswers(at, answers))


@pytest.mark.parametrize(
    ("message", "note"),
    [
        (sent(), "; restored reasoning: 1"),
        (sent(texts=("So.",)), "; restored reasoning: 1; restored spelling: 1"),
        (
            sent(uses=(ToolUse("read", {"path": "x", "what": "y"}, "call_other"),)),
            "; restored reasoning: 1; restored spelling: 1",
        ),
        (sent(reasoning="Hm.", texts=("So. ",)), "; restored spelling: 1"),
    ],
    ids=["as it was", "trimmed", "adapt_messages otherwise", "its thought sent back"],
)
def test_an_answer_comes_back_as_it_was(message, note):
    made = restored(asking(message))
    (answer,) = made.request.messages[len(ASKED) :]

    assert (answer.reasoning, answer.texts, answer.uses[0].id) == ("Hm.", ("\n\nSo.",), "call_own")
    assert list(answer.uses[0].arguments) == ["what", "path"]
    assert made.note == note


def test_templates_that_print_text_are_given_what_the_model_wrote():
    """Others print the object in their own way, with its keys in the model's order."""
    (answer,) = restored(asking(sent())).request.messages[len(ASKED) :]
    for is_text, arguments in ((True, WRITTEN), (False, {"what": "y", "path": "x"})):
        (said,) = adapt_messages([template_form(answer)], TemplateTraits(text_arguments=is_text))
        assert said["tool_calls"][0]["function"]["arguments"] == arguments


def test_results_follow_their_calls_ids():
    other = ToolUse("read", json.loads(WRITTEN), "call_other")
    made = restored(asking(sent(uses=(other,)), RESULT, replace(RESULT, result_of="call_else")))
    assert [message.result_of for message in made.request.messages[-2:]] == [
        "call_own",
        "call_else",
    ]


@pytest.mark.parametrize("ids", [("a", "a"), ("a", None)], ids=["the same twice", "one without"])
def test_ids_that_may_be_mistaken_stay(ids):
    answer = replace(ANSWER, uses=(CALL, replace(CALL, id="call_second")))
    uses = tuple(ToolUse("read", json.loads(WRITTEN), own) for own in ids)
    made = restored(asking(sent(uses=uses), RESULT), remember({}, ASKED, answer))
    assert tuple(use.id for use in made.request.messages[-2].uses) == ids


@pytest.mark.parametrize(
    "messages",
    [
        [sent(texts=("Else.",))],
        [sent(uses=())],
        [Message(MessageRole.USER, ("And?",)), sent(uses=(replace(CALL, id="call_other"),))],
    ],
    ids=["other text", "no call", "another place"],
)
def test_nothing_else_is_touched(messages):
    request = asking(*messages)
    assert restored(request).request == request
    assert restored(request).note == ""


def test_a_thought_of_the_clients_own_stays():
    made = restored(asking(sent(reasoning="My own.")))
    assert made.request.messages[-1].reasoning == "My own."


def test_a_thought_that_a_policy_took_away_stays_away():
    made = restored(asking(sent(is_stripped=True, texts=("So.",))))
    assert made.request.messages[-1].reasoning is None
    assert made.note == "; restored spelling: 1", "all else comes back"


def test_a_request_can_refuse_it_and_templates_never_see_the_option():
    refused = restored(asking(sent(), **{RESTORE_OPTION: False, "enable_thinking": True}))
    assert refused.request == asking(sent(), enable_thinking=True)
    assert restored(asking(sent(), **{RESTORE_OPTION: True})).note
    assert not restored(asking(sent()), told={RESTORE_OPTION: False}).note


def test_what_is_remembered_is_bounded_and_the_newest():
    answers, messages = {}, list(ASKED)
    for turn in range(40):
        answer = Message(MessageRole.ASSISTANT, (f"{turn}",), reasoning=f"{turn:05}" * 1_000)
        answers = remember(answers, messages, answer)
        messages += [replace(answer, reasoning=None), Message(MessageRole.USER, ("On.",))]
    assert sum(said.size_bytes for said in answers.values()) <= ANSWERS_BYTES_MAX
    assert [said.reasoning[:5] for said in answers.values()][-1] == "00039"
    made = restored(asking(*messages[2:]), answers)
    size_bytes = max(said.size_bytes for said in answers.values())
    assert made.note == f"; restored reasoning: {ANSWERS_BYTES_MAX // size_bytes}"


@pytest.mark.parametrize("is_redacted", [False, True])
def test_what_directives_took_out_of_an_answer_is_not_remembered(is_redacted):
    """The answer stays known by its place and its call's id, without thought and arguments."""
    left = replace(ANSWER, reasoning=None, uses=(replace(CALL, arguments={}),))
    redacted = {len(ASKED): left} if is_redacted else {}
    later = Message(MessageRole.ASSISTANT, ("\n\nNext.",))
    answers = remember(ANSWERS, (*ASKED, sent(), RESULT), later, redacted=redacted)
    (known,) = (each for each in answers.values() if each.calls)
    assert (known.reasoning, known.calls[0].arguments) == (
        ("", "") if is_redacted else ("Hm.", WRITTEN)
    )
    assert known.calls[0].id == "call_own"


def test_what_is_no_text_is_not_remembered():
    assert remember({}, ASKED, replace(ANSWER, reasoning="half \ud800")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", sample([False, True], True), ids=["no ids", "ids"])
def test_an_answer_is_known_after_a_restart_and_to_other_conversations(tmp_path, has_ids):
    """Its record tells of it; a conversation that was edited behind it is another's."""
    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script:
        with running(tmp_path, str(model)) as service:
            driver = Driver(service, shape, script, has_ids)
            talk = Talk(driver, tools=TOOLS, echo=drop_thought)
            talk.ask(call=("read", {"path": "x"}))
        asked = talk.messages
        script.end = None  # a node tests itself as it starts
        with running(tmp_path, str(model)) as service:
            driver.service = service
            for name, result in (("one", "first"), ("two", "second")):
                call = asked[-1]["tool_calls"][0]["id"]
                more = {"role": "tool", "tool_call_id": call, "content": result}
                Talk(driver, name, tools=TOOLS, messages=[*asked, more]).answer()
    first, *others = driver.turns
    assert len({turn.agent for turn in driver.turns}) == 2
    assert all(turn.cached > first.prompt + 20 for turn in others)


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", sample([False, True], True), ids=["no ids", "ids"])
def test_a_loop_whose_client_drops_thoughts_extends_what_is_stored(tmp_path, has_ids):
    """Each step then computes what is new; told not to, it computes its last answer again."""
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


def test_what_is_remembered_is_read_once_a_turn_and_hashed_once_beside_the_loop(
    tmp_path, monkeypatch
):
    """Of the messages; the new answer is hashed where it ends."""
    hashed, read, add, decode_answers = [], [], restoring._extend, indexes.decode_answers

    def adding(digest, message):
        hashed.append((threading.current_thread().name.split("_")[0], message.role))
        return add(digest, message)

    def reading(spelled):
        read.append(spelled)
        return decode_answers(spelled)

    shape = SHAPES["thought_opened"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, shape, script, has_ids=True)
        talk = Talk(driver, tools=TOOLS, echo=drop_thought)
        monkeypatch.setattr(restoring, "_extend", adding)
        monkeypatch.setattr(indexes, "decode_answers", reading)
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
def test_an_agent_that_answered_plainly_is_given_nobody_elses_spelling(tmp_path, spaced):
    """Two agents say the same at the same place, but for white space; each goes on with its own."""
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


def test_what_another_agent_gave_is_remembered_where_it_was_put_back(tmp_path):
    """A conversation that goes on under another name finds its own record from then on."""
    shape = SHAPES["chatml"]
    model = write_shape(tmp_path / "model", shape, "full", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, shape, script, has_ids=True)
        first = Talk(driver, "one", echo=lambda said: {**said, "content": said["content"].strip()})
        first.ask("Why?", text="So it is.  ", thought="")
        other = Talk(driver, "two", messages=first.messages)
        for question in ("And?", "What else?"):
            other.ask(question, text="", thought="")
            assert (
                "So it is.  "
                in service.node.resources.table.get((driver.tenant, AgentId("two"))).manifest.text
            )


@pytest.mark.parametrize("depth", [100, 900, 990, 995, 1_000, 1_000_000])
def test_arguments_in_however_many_brackets_are_some(depth):
    """A client's JSON in a text is as deep as it likes."""
    deep = "[" * depth + "]" * depth
    use = replace(CALL, arguments=deep)
    found = locate_messages(asking(sent(uses=(use,)), RESULT))
    known = remember({}, found.request.messages, replace(ANSWER, uses=(use,)))
    made = restored(found.request, known)
    assert made.request.messages[len(ASKED)].uses[0].arguments == deep
