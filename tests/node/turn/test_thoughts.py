"""Thoughts that clients leave out of earlier answers come back, in their own places only."""

from dataclasses import replace

import pytest

from fabric.ids import OperationId, TenantId
from fabric.limits import THOUGHTS_BYTES_MAX
from fabric.template_options import RESTORE_OPTION
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from fabric.turn.messages import Message, MessageRole, ToolUse
from node.turn.thoughts import NO_THOUGHTS, put_back, remember
from tests.support.agent_traffic import TOOLS, Driver, Talk, corpus, drop_thought
from tests.support.conversations import said
from tests.support.scripted_answers import scripted
from tests.support.services import running
from tests.support.template_shapes import SHAPES, write_shape

ASKED = said([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
CALL = ToolUse("read", '{"path": "x", "what": "y"}')
ANSWER = Message(MessageRole.ASSISTANT, ("\n\nSo.",), reasoning="Hm.", uses=(CALL,))
THOUGHTS = remember(NO_THOUGHTS, ASKED, ANSWER)


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
    return replace(ANSWER, **{"reasoning": None, **changes})


@pytest.mark.parametrize(
    "message",
    [
        sent(),
        sent(texts=("So.",)),
        sent(uses=(ToolUse("read", {"what": "y", "path": "x"}, "call_other"),)),
    ],
    ids=["as it was", "trimmed", "spelled otherwise"],
)
def test_a_thought_comes_back(message):
    made = put_back(asking(message), THOUGHTS)
    assert made.request.messages[-1] == replace(message, reasoning="Hm.")
    assert made.note == "; restored reasoning: 1"


@pytest.mark.parametrize(
    "messages",
    [
        [sent(texts=("Else.",))],
        [sent(uses=())],
        [sent(reasoning="My own.")],
        [Message(MessageRole.USER, ("And?",)), sent()],
    ],
    ids=["other text", "no call", "sent back", "another place"],
)
def test_nothing_else_is_touched(messages):
    request = asking(*messages)
    assert put_back(request, THOUGHTS).request == request
    assert put_back(request, THOUGHTS).note == ""


def test_a_request_can_refuse_it_and_templates_never_see_the_option():
    refused = put_back(asking(sent(), **{RESTORE_OPTION: False, "enable_thinking": True}), THOUGHTS)
    assert refused.request == asking(sent(), enable_thinking=True)
    assert put_back(asking(sent(), **{RESTORE_OPTION: True}), THOUGHTS).note


def test_what_is_remembered_is_bounded_and_the_newest():
    thoughts, messages = NO_THOUGHTS, list(ASKED)
    for turn in range(40):
        answer = Message(MessageRole.ASSISTANT, (f"{turn}",), reasoning=f"{turn:05}" * 1_000)
        thoughts = remember(thoughts, messages, answer)
        messages += [replace(answer, reasoning=None), Message(MessageRole.USER, ("On.",))]
    assert sum(map(len, thoughts.values())) <= THOUGHTS_BYTES_MAX
    assert next(text[:5] for text in thoughts.values()) == "00039"
    restored = put_back(asking(*messages[2:]), thoughts)
    assert restored.note == f"; restored reasoning: {THOUGHTS_BYTES_MAX // 5_000}"


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", [False, True], ids=["no ids", "ids"])
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
