"""Forced calls of several families, generated and refused by real nodes."""

import asyncio
import json
import threading
from unittest import mock

import jsonschema
import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice
from fabric.turn.generation import FinishReason, ToolCalls
from node.limits import CALL_SCHEMAS_BYTES_MAX
from tests.support.chat_models import (
    CODER,
    FUNCTION_GEMMA,
    FUNCTION_GEMMA_SPECIALS,
    HARMONY,
    HARMONY_SPECIALS,
    KIMI3,
    KIMI3_SPECIALS,
    MINICPM,
    MINICPM_SPECIALS,
    MISTRAL,
    MISTRAL_SPECIALS,
    QWEN3,
    QWEN_SPECIALS,
    R1,
)
from tests.support.formats import HOSTILE
from tests.support.samples import sample
from tests.support.services import ask, running
from tests.support.template_shapes import Shape, write_shape

QUESTION = [{"role": "user", "content": "Where is the sky?"}]
LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "required": ["at", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"look": LOOK, "now": {"maxProperties": 0}}
DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>"),
)
SHAPES = {
    "qwen3": (QWEN3, QWEN_SPECIALS, "<|im_end|>"),
    "coder": (CODER, QWEN_SPECIALS, "<|im_end|>"),
    "mistral": (MISTRAL, (*MISTRAL_SPECIALS, "</s>"), "</s>"),
    "deepseek": (R1, DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "harmony": (HARMONY, HARMONY_SPECIALS, "<|call|>"),
    "function gemma": (
        FUNCTION_GEMMA,
        (*FUNCTION_GEMMA_SPECIALS, "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "minicpm": (MINICPM, (*MINICPM_SPECIALS, "<|im_end|>"), "<|im_end|>"),
    "kimi 3": (KIMI3, KIMI3_SPECIALS, "<|end_of_msg|>"),
}
MUST = CallChoice(must_call=True, takes_one=True)


@pytest.fixture(scope="module", params=SHAPES)
def node(request, tmp_path_factory):
    template, specials, end = SHAPES[request.param]
    shape = Shape(request.param, template, specials, end, str)
    folder = tmp_path_factory.mktemp(request.param)
    model = write_shape(folder / "model", shape, "full", ["the sky is blue"] * 9)
    with running(folder, str(model)) as node:
        yield node


def calls_of(reply):
    return [call for event in reply.events if isinstance(event, ToolCalls) for call in event.calls]


def short_thoughts(node):
    """Bias a random model towards the end of its thought."""
    ids = node.node.turns.prompts.tokenizer.added_ids
    return {str(ids[text]): 9.0 for text in ("</think>", "<|end|>") if text in ids}


@pytest.mark.parametrize("names", sample([(), ("look",), ("now",)], ("look",)))
def test_forced_answer_is_a_valid_call(node, names):
    for seed in range(2):
        reply = ask(
            node,
            QUESTION,
            tools=TOOLS,
            calls=CallChoice(must_call=True, names=names, takes_one=True),
            max_tokens=600,
            temperature=1.0,
            seed=seed,
            logit_bias=short_thoughts(node),
        )
        assert reply.finished.reason is FinishReason.TOOL_CALLS
        assert (reply.text, reply.finished.broken_calls) == ("", 0)
        (call,) = calls_of(reply)
        assert call.name in (names or ("look", "now"))
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_strict_call_in_channels_is_valid_without_a_forced_call(tmp_path):
    """No single token begins such a call, so the grammar covers the whole answer."""
    template, specials, end = SHAPES["harmony"]
    shape = Shape("harmony", template, specials, end, str)
    model = write_shape(tmp_path / "model", shape, "full", ["the sky is blue"] * 9)
    choice = CallChoice(names=("look",), strict=("look",), takes_one=True)
    calls = []
    with running(tmp_path, str(model)) as node:
        more = {"max_tokens": 200, "temperature": 1.0, "logit_bias": short_thoughts(node)}
        for seed in range(4):
            reply = ask(node, QUESTION, tools=TOOLS, calls=choice, seed=seed, **more)
            assert reply.finished.broken_calls == 0
            calls += calls_of(reply)
    assert {call.name for call in calls} == {"look"}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), LOOK)


def test_channels_allow_several_calls_in_one_answer(tmp_path):
    template, specials, end = SHAPES["harmony"]
    shape = Shape("harmony", template, specials, end, str)
    model = write_shape(tmp_path / "model", shape, "full", ["the sky is blue"] * 9)
    choice, counts = CallChoice(must_call=True, names=("now",)), set()
    with running(tmp_path, str(model)) as node:
        more = {"max_tokens": 400, "temperature": 1.0, "logit_bias": short_thoughts(node)}
        more["logit_bias"] = dict.fromkeys(more["logit_bias"], 1.0)
        for seed in range(12):
            reply = ask(node, QUESTION, tools=TOOLS, calls=choice, seed=seed, **more)
            if not reply.finished.broken_calls:  # by the limit of tokens
                assert (reply.text, reply.finished.reason) == ("", FinishReason.TOOL_CALLS)
                counts.add(len(calls_of(reply)))
            if counts & {2, 3, 4}:
                break
    assert counts & {2, 3, 4}


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    with running(tmp_path_factory.mktemp("recall"), "recall") as node:
        yield node


def tool(parameters, name="bad"):
    return [
        *TOOLS,
        {"type": "function", "function": {"name": name, "parameters": parameters}},
    ]


BAD = {
    "no object": {"type": "string"},
    "no type": {"type": "object", "properties": {"a": {"type": "nonsense"}}},
    "no regex": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}},
    "nothing fits": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "too deep": {"type": "object", "properties": json.loads(HOSTILE["nested objects"].source)},
}


@pytest.mark.parametrize("name", BAD)
def test_uncompilable_schema_is_refused_naming_the_tool(recall, name):
    with pytest.raises(RejectedError, match="the tool 'bad'") as caught:
        ask(recall, QUESTION, tools=tool(BAD[name]), calls=MUST)
    error = caught.value
    assert (int(error.status), error.code, error.param) == (
        *(400, "invalid_function_parameters", "tools"),
    )
    assert len(error.message) > 60


def test_invalid_schema_of_a_lenient_tool_is_ignored(recall):
    """Only strict tools' schemas are compiled; an invalid schema of another tool is ignored."""
    calls = CallChoice(strict=("look",))
    ask(recall, QUESTION, tools=tool(BAD["no regex"]), calls=calls, max_tokens=4)
    strict = CallChoice(strict=("bad",))
    with pytest.raises(RejectedError, match="the tool 'bad'"):
        ask(recall, QUESTION, tools=tool(BAD["no regex"]), calls=strict)


def test_total_size_of_tool_schemas_is_bounded(recall):
    words = {"a": {"description": "x" * (CALL_SCHEMAS_BYTES_MAX // 2), "type": "string"}}
    tools = tool({"type": "object", "properties": words}) + tool(
        {"type": "object", "properties": words}, "other"
    )
    with pytest.raises(RejectedError, match="schemas of all tools"):
        ask(recall, QUESTION, tools=tools, calls=MUST)


def test_forced_call_needs_a_tool_and_an_end(recall):
    with pytest.raises(RejectedError, match="has no tool to call"):
        ask(recall, QUESTION, calls=MUST)
    with pytest.raises(RejectedError, match="ignore_eos"):
        ask(recall, QUESTION, tools=TOOLS, calls=MUST, ignore_eos=True)


def test_forced_call_without_a_call_format_is_refused(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    shape = Shape("plain", template, ("<end>",), "<end>", str)
    model = write_shape(tmp_path / "model", shape, "full", ["the sky"] * 9)
    with running(tmp_path, str(model)) as node:
        with pytest.raises(
            RejectedError, match="this model's tool-call format is unknown"
        ) as caught:
            ask(node, QUESTION, tools=TOOLS, calls=MUST)
        assert (int(caught.value.status), caught.value.param) == (400, "tool_choice")
        assert ask(node, QUESTION, tools=TOOLS, calls=CallChoice(strict=("look",))).finished


def test_concurrent_requests_share_one_compilation(recall):
    parts, gate, entered = recall.node.turns.prompts.grammars, threading.Event(), threading.Event()
    compile_ = parts.compiler.compile_expression
    parts._kept.clear()

    def slow(expression):
        entered.set()
        gate.wait(30)
        return compile_(expression)

    async def together():
        asking = [asyncio.to_thread(ask, recall, QUESTION, tools=TOOLS, calls=MUST) for _ in "abc"]
        waiting = asyncio.gather(*asking)
        await asyncio.to_thread(entered.wait, 30)
        while parts._waiting_count < 3:  # noqa: ASYNC110 - the node's loop is another
            await asyncio.sleep(0.01)
        gate.set()
        return await waiting

    with mock.patch.object(parts.compiler, "compile_expression", side_effect=slow) as compiled:
        replies = asyncio.run(together())
    assert compiled.call_count == 1
    assert all(len(calls_of(reply)) == 1 for reply in replies)
    assert not parts._compiling
