"""Conversations over the families' own chat templates, as a package of a registry ships them."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
from mlx_lm.tokenizer_utils import load
from transformers.utils.chat_template_utils import render_jinja_template

from fabric.turn.alignment import common_prefix
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.clients.installed import wheel_folder
from tests.node.mlx.test_chat_tokenizer import answer
from tests.node.turn.test_reuse import converse, judge
from tests.support.agent_traffic import SCENARIOS, TOOLS, corpus
from tests.support.template_shapes import ScriptedAnswer, Shape, write_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
# What ends an answer; another token may end one that calls.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>",),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "gemma": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2_2_5": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "llama3_1": ("<|eot_id|>",),
    "llama3_2": ("<|eot_id|>",),
    "nemotron_3_nano": ("<|im_end|>",),
    "nemotron_3_super": ("<|im_end|>",),
    "phi3": ("<|end|>",),
    "phi3_5": ("<|end|>",),
    "qwen2_5": ("<|im_end|>",),
    "qwen3": ("<|im_end|>",),
    "qwen3_instruct_2507": ("<|im_end|>",),
    "qwen3_5_nothink": ("<|im_end|>",),
    "qwen3_5_think": ("<|im_end|>",),
    "qwen3_6": ("<|im_end|>",),
    "qwen3_8": ("<|im_end|>",),
}
RECURRENT = ("nemotron_3_nano", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
MARK = re.compile(r"<\|[\w ]+\|?>|<\w+\|>|<｜[\w▁]+｜>|</?(?:think|tool_call)>|\[gMASK\]|<sop>")
QUESTION = {"role": "user", "content": "?"}


def render(template, messages, **options):
    (text,), _ = render_jinja_template([messages], chat_template=template, **options)
    return text


def spell_answer(template, ends, options, scripted):
    """Spell an answer as the template itself writes the last message of a conversation."""
    prompt = render(template, [QUESTION], add_generation_prompt=True, **options)
    thought = "" if prompt.rstrip().endswith("</think>") else scripted.thought
    message = {"role": "assistant", "content": scripted.text}
    if thought:
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    whole = ""
    for spelled in (lambda arguments_: arguments_, json.dumps):
        if scripted.call:
            name, arguments = scripted.call
            function = {"name": name, "arguments": spelled(arguments)}
            message["tool_calls"] = [{"type": "function", "id": "abcdefghi", "function": function}]
        try:
            whole = render(template, [QUESTION, message], **options)
            break
        except TypeError:  # the template concatenates texts
            continue
    shared = prompt[: common_prefix(prompt, whole)]
    rest = whole[len(re.sub(r"<[^<>\n]*$", "", shared)) :].rstrip("\n")
    for end in ends:
        rest = rest.removesuffix(end)
    if prompt.rstrip().endswith("<think>") and shared != prompt:  # the template drops thoughts
        rest = f"{thought}\n</think>\n\n{rest}"
    return rest


def original(name):
    template = "{% set bos_token = '<s>' %}"
    template += (wheel_folder("trl") / f"trl/chat_templates/{name}.jinja").read_text()
    ends = ENDS[name]
    specials = dict.fromkeys(["<s>", *ends, *MARK.findall(template)])
    options = {"enable_thinking": False} if name.endswith("nothink") else {}
    specials |= dict.fromkeys(["<start_of_turn>", "<end_of_turn>"] if "gemma" in name else [])
    return Shape(
        name,
        template,
        tuple(specials),
        ends[0],
        partial(spell_answer, template, ends, options),
        end_of_call=ends[-1],
        options=options,
        has_tools="read"
        in spell_answer(template, ends, options, ScriptedAnswer(call=("read", {}))),
    )


# Their templates have a switch that keeps thoughts.
SWITCHED = [("full", name) for name in ("qwen3_6", "gemma4_v5", "lfm2_2_5")]
NEED_TOOLS = {"tools", "tools_trimmed", "tools_kept", "long_loop", "sub_agents"}
CELLS = [("full", name) for name in ENDS] + [("recurrent", name) for name in RECURRENT]


@pytest.mark.parametrize("has_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize(("weights", "name"), CELLS)
def test_reuse_of_every_scenario_with_original_templates(tmp_path, weights, name, has_ids):
    shape = original(name)
    scenarios = [each for each in SCENARIOS if shape.has_tools or each not in NEED_TOOLS]
    judge(name, converse(tmp_path, weights, shape, scenarios, has_ids=has_ids))


@pytest.mark.parametrize(("weights", "name"), [("recurrent", "qwen3_6"), *SWITCHED])
def test_question_after_a_tool_loop_is_warm_if_thoughts_are_kept(tmp_path, weights, name):
    shape = replace(original(name), options={"preserve_thinking": True})
    judge(name, converse(tmp_path, weights, shape, ["long_loop"], has_ids=False))


@pytest.mark.parametrize("name", ENDS)
def test_answer_spelled_by_the_template_is_read_back(tmp_path, name):
    shape = original(name)
    write_tokenizer(tmp_path, shape, corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    call = ("read", {"path": "the sky"}) if shape.has_tools else None
    text_in = "" if name == "gptoss" else "I look."  # its calls have a thought or a text, not both
    says = shape.say(ScriptedAnswer(text_in, "Where?", call))
    text, thought, calls = answer(tokenizer, [QUESTION], says + shape.end, TOOLS, **shape.options)

    assert text == (text_in if text_in in says else "")
    assert thought == ("Where?" if "Where?" in says else "")
    assert [(each.name, json.loads(each.arguments)) for each in calls] == ([call] if call else [])
