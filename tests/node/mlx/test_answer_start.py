"""An answer is read from the template's opening, with any text in the conversation."""

import json

import pytest

from fabric.turn.answer_constraints import CallChoice
from node.mlx.answer import Answer
from tests.support.call_shapes import CALL_SHAPES, CallShape
from tests.support.chat_models import chat_tokenizer

TOOL = {
    "name": "read",
    "description": "Read.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
READ = ("read", {"path": "a b", "lines": 3})
# Templates get these with `properties` added: the rendered schema differs from the sent one.
LOOSE = [*TOOLS, {"type": "function", "function": {"name": "stop", "parameters": {}}}]
USER = {"role": "user", "content": "What is in it?"}


def conversation_with_result(result):
    """Return a conversation whose last message is the result of a call."""
    function = {"name": READ[0], "arguments": READ[1]}
    uses = [{"type": "function", "id": "abcdefghi", "function": function}]
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": uses},
        {"role": "tool", "name": "read", "tool_call_id": "abcdefghi", "content": result},
    ]


def hostile_results(shape: CallShape):
    """Return results that contain the marks of their family's answers and prompts."""
    call = shape.calls(READ)
    yield from (call, call[: len(call) // 2], shape.thinks("Hm", after_result=False))
    yield from (shape.thought[0], shape.thought[1], shape.end, "".join(shape.specials))


def states(shape: CallShape):
    yield "first", [USER], False
    yield "after a result", conversation_with_result("text"), True
    for number, result in enumerate(hostile_results(shape)):
        yield f"after a hostile result {number}", conversation_with_result(result), True


@pytest.fixture(params=CALL_SHAPES)
def shape(request):
    return CALL_SHAPES[request.param]


@pytest.fixture
def model(shape, tmp_path):
    return chat_tokenizer(tmp_path, shape.template, shape.specials, end=shape.end)


def answer(model, messages, says, tools=TOOLS, **choice):
    """Return the shown parts of an answer that the model ends itself."""
    prompt = model.rendered(messages, tools, {})
    assert prompt.text.endswith(prompt.begun)
    reply = Answer(model, prompt.begun, (), tools, **choice)
    shown = [reply.push(token) for token in model.encode(says).ids]
    shown.append(reply.finish(stopped=False))
    text = "".join(each.text for each in shown)
    thought = "".join(each.reasoning for each in shown)
    calls = [(c.name, json.loads(c.arguments)) for each in shown for c in each.calls]
    assert reply.reader.has_calls == bool(calls)
    return text, thought, calls


def wrap_text(shape: CallShape, text: str) -> str:
    if shape.name == "harmony":
        return f"<|start|>assistant<|channel|>final<|message|>{text}"
    return text


def test_text_after_a_tool_result_is_text(shape, model):
    for name, messages, after_result in states(shape):
        generated = wrap_text(shape, "It is *x*.") + shape.end
        if shape.opens[after_result]:
            generated = shape.thinks("Hm.", after_result=after_result) + generated
        text, _, calls = answer(model, messages, generated)
        assert (text, calls) == ("It is *x*.", []), name


def test_thoughts_and_calls_after_a_tool_result_are_recognized(shape, model):
    for name, messages, after_result in states(shape):
        thinks = shape.thinks("Hm.", after_result=after_result)
        says = thinks + shape.calls(READ) + shape.end
        assert answer(model, messages, says) == ("", "Hm.", [READ]), name


def test_completed_tool_schemas_do_not_change_the_answer_start(shape, model):
    for name, messages, after_result in states(shape):
        thinks = shape.thinks("Hm.", after_result=after_result)
        says = thinks + shape.calls(READ) + shape.end
        begun = model.rendered(messages, LOOSE, {}).begun
        assert begun == model.rendered(messages, TOOLS, {}).begun, name
        assert answer(model, messages, says, LOOSE) == ("", "Hm.", [READ]), name


def test_call_quoted_in_a_thought_stays_in_the_thought(shape, model):
    if shape.name == "harmony":  # its calls are messages of their own
        pytest.skip("thoughts of this format hold no calls")
    quote = f"So: {shape.calls(READ)} I think."
    for name, messages, after_result in states(shape):
        says = shape.thinks(quote, after_result=after_result) + "Yes." + shape.end
        assert answer(model, messages, says) == ("Yes.", quote, []), name


def test_call_after_a_tool_result_counts_as_the_first(shape, model):
    thinks = shape.thinks("Hm.", after_result=True)
    other = ("read", {"path": "c"})
    says = thinks + shape.calls(READ, other) + shape.end
    one = CallChoice(takes_one=True)
    for name, messages, after_result in states(shape):
        if after_result:
            assert answer(model, messages, says, choice=one) == ("", "Hm.", [READ]), name


def test_all_parallel_calls_are_read(shape, model):
    other = ("read", {"path": "\n c\n"})
    thinks = shape.thinks("Hm.", after_result=True)
    says = thinks + shape.calls(READ, other) + shape.end
    assert answer(model, conversation_with_result("text"), says)[2] == [READ, other]
