"""A run's question becomes the same request as a chat with its messages."""

from dataclasses import fields

import pytest

from fabric.errors import RejectedError
from fabric.limits import MESSAGES_MAX
from fabric.ports import Clock
from fabric.turn.messages import Message, MessageRole
from router.api.adapter import ApiRequest
from router.api.turn_route import parsed_request
from router.openai.chat_adapter import ChatAdapter
from router.runs.in_process import turn_request
from router.scenario.conversation import prompt
from router.scenario.fabric_client import Question, read_arguments
from router.scenario.reader import read_scenario
from router.scenario.scenario import KeptEdits, TurnOptions
from router.scenario.tool_answers import offered_tools
from router.scenario.transcript import AnsweredCall, ToolStep, TurnKey
from tests.router.scenario.script_fabric import CREW
from tests.support.http_fabric_client import chat_body

SCENARIO = read_scenario(CREW, "crew.yaml")
TURN = TurnKey("read", 1, "lead")


def parsed(question):
    chats = ChatAdapter(Clock)
    return parsed_request(chats, {"x-agent-id": question.agent}, chat_body(question, "recall"))


@pytest.mark.parametrize(
    "options",
    [TurnOptions(), TurnOptions(7, 0.5), *(TurnOptions(edits=edits) for edits in KeptEdits)],
)
@pytest.mark.parametrize(
    "arguments",
    ["", " \n", "{", "[1]", "{}", '{"path": "a.py", "lines": [1, {"é": null}]}', '{"b": 1, "a": 2}',
     '{"n": NaN}'],
)  # fmt: skip
def test_turn_request_equals_parsed_chat_request(options, arguments):
    calls = (AnsweredCall("call_1", "read_file", read_arguments(arguments), "secret plan"),)
    steps = (ToolStep(calls), ToolStep((*calls, *calls), "reads on"))
    messages = prompt(SCENARIO, {}, TURN, steps)
    question = Question("scn.crew.lead", messages, tuple(offered_tools(SCENARIO, "lead")), options)
    request, chat = turn_request(question, "recall"), parsed(question)
    for each in fields(ApiRequest):
        assert getattr(request, each.name) == getattr(chat, each.name), each.name


def test_agent_without_tools_is_offered_none():
    question = Question("scn.crew.one", prompt(SCENARIO, {}, TURN), (), TurnOptions())
    assert turn_request(question, "recall").prompt == parsed(question).prompt


def test_prompt_with_too_many_messages_is_rejected():
    messages = (Message(MessageRole.USER, ("more",)),) * (MESSAGES_MAX + 1)
    with pytest.raises(RejectedError):
        turn_request(Question("scn.crew.one", messages, (), TurnOptions()), "recall")


def test_deeply_nested_arguments_stay_text():
    text = '{"a":' * 100_000
    assert read_arguments(text) == text
