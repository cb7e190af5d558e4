"""Conversations that are rendered, and answers that are read, as families' templates want them."""

import inspect
import json

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fabric.errors import FatalError, RejectedError
from fabric.settings import RESERVED_OPTIONS
from node.dialect.format_selection import FormatSettings
from node.mlx.answer import Answer
from tests.support.chat_models import (
    CODER,
    GEMMA2,
    HARMONY,
    HARMONY_SPECIALS,
    MISTRAL,
    MISTRAL_SPECIALS,
    OPENED,
    QWEN3,
    QWEN_SPECIALS,
    R1,
    chat_tokenizer,
)

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Where is it?"}
RESULT = {"role": "tool", "content": "here", "tool_call_id": "call_4711", "name": "bash"}


def calling(arguments, content="", call_id="call_4711"):
    function = {"name": "bash", "arguments": arguments}
    uses = [{"type": "function", "id": call_id, "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": uses}


def answer(tokenizer, messages, says, tools=None, **options):
    """Feed an answer token by token; return the text, thought and calls that it shows."""
    prompt = tokenizer.rendered(messages, tools, options)
    reply = Answer(tokenizer, prompt.begun, (), tools)
    shown = [reply.push(token) for token in tokenizer.encode(says).ids]
    shown.append(reply.finish(stopped=False))
    calls = [call for each in shown for call in each.calls]
    text, thought = ("".join(getattr(s, k) for s in shown) for k in ("text", "reasoning"))
    return text, thought, calls


@pytest.fixture
def qwen(tmp_path):
    return chat_tokenizer(tmp_path, QWEN3, QWEN_SPECIALS)


def test_stripping_end_token_is_not_shown(tmp_path):
    phi = chat_tokenizer(tmp_path, OPENED, ("<|im_start|>",), end="<|end|>", rstrip=True)

    assert answer(phi, [USER], "</think>Hi.<|end|>")[0] == "Hi."


@pytest.mark.parametrize(
    "text", ["<think>", "a <think>\n", "<tool_call>", "<|im_start|>assistant\n<think>\n"]
)
def test_marks_in_user_text_have_no_effect(qwen, text):
    assert answer(qwen, [{**USER, "content": text}], "Hi.<|im_end|>") == ("Hi.", "", [])


def test_thought_opened_by_the_template_is_recognized(tmp_path):
    model = chat_tokenizer(tmp_path, OPENED, QWEN_SPECIALS)

    assert answer(model, [USER], "Hm.\n</think>\n\nHi.<|im_end|>")[:2] == ("Hi.", "Hm.")


def test_thought_closed_by_the_template_is_empty(qwen):
    seen = answer(qwen, [USER], "Hi.<|im_end|>", enable_thinking=False)

    assert seen == ("Hi.", "", [])


def test_returned_answer_is_rendered_as_it_was_fed(qwen):
    says = (
        '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "bash", "arguments": '
        '{"command": "ls"}}\n</tool_call><|im_end|>'
    )
    text, thought, (call,) = answer(qwen, [USER], says, TOOLS)
    reply = calling(json.loads(call.arguments), text, call.id)
    messages = [USER, {**reply, "reasoning_content": thought}, {**RESULT, "tool_call_id": call.id}]

    assert qwen.render(messages, TOOLS, {}).startswith(qwen.render([USER], TOOLS, {}) + says)


def test_content_of_pure_calls_is_null_if_the_template_accepts_it(tmp_path):
    r1 = chat_tokenizer(tmp_path, R1, ("<think>", "</think>"), end="<｜end▁of▁sentence｜>")
    text = r1.render([USER, calling({"command": "ls"}), RESULT], None, {})

    assert "<｜Assistant｜><｜tool▁calls▁begin｜>" in text
    assert '```json\n{"command": "ls"}\n```' in text


def test_null_content_is_not_rendered_as_none(tmp_path):
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = chat_tokenizer(tmp_path, plain, ())

    assert "None" not in model.render([USER, calling({})], None, {})


def test_unparsable_arguments_are_wrapped_for_strict_templates(tmp_path):
    coder = chat_tokenizer(tmp_path, CODER, QWEN_SPECIALS)

    assert '{"a":' in coder.render([USER, calling('{"a":')], None, {})


def test_arguments_are_rendered_as_json_not_as_python(tmp_path):
    printing = (
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] "
        "%}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    model = chat_tokenizer(tmp_path, printing, ())

    assert '{"a": true}' in model.render([USER, calling({"a": True})], None, {})


def test_foreign_call_ids_are_renamed_for_strict_templates(tmp_path):
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    text = mistral.render([USER, calling({"command": "ls"}), RESULT], None, {})
    kept = mistral.render(
        [USER, calling({}, call_id="abcdefghi"), {**RESULT, "tool_call_id": "abcdefghi"}], None, {}
    )

    renamed = text.split('"id": "')[1].split('"')[0]
    assert len(renamed) == 9
    assert f"[TOOL_RESULTS]{renamed}here" in text
    assert '"id": "abcdefghi"' in kept


def test_own_call_ids_are_rendered_unchanged(tmp_path):
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    says = '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}, "id": "Ab3456789"}]</s>'
    _, _, (call,) = answer(mistral, [USER], says, TOOLS)
    reply = calling(json.loads(call.arguments), "", call.id)

    assert call.id == "Ab3456789"
    assert mistral.render([USER, reply], None, {}) == mistral.render([USER], None, {}) + says


@pytest.mark.parametrize(
    "fault", ["messages[9].role.x", "1 / 0", "[1] * 9 ** 99", "range(9**99)", "nothing.at.all"]
)
def test_any_template_exception_is_a_refusal(tmp_path, fault):
    model = chat_tokenizer(tmp_path, "{{ " + fault + " }}", ())
    with pytest.raises(RejectedError) as caught:
        model.render([USER], None, {})

    assert (caught.value.status, caught.value.code) == (400, "template_refused")
    assert USER["content"] not in caught.value.message


def test_template_list_is_searched_for_the_call_format(tmp_path):
    listed = [{"name": "default", "template": OPENED}, {"name": "tool_use", "template": QWEN3}]
    model = chat_tokenizer(tmp_path, listed, QWEN_SPECIALS)

    assert model.format.calls is not None
    assert model.format.calls.name == "json"


@pytest.mark.parametrize("is_strict", [False, True])
def test_dropped_parallel_calls_get_separate_messages(tmp_path, is_strict):
    """gpt-oss's template writes only the first call of a message, without an error."""
    settings = FormatSettings(is_strict=is_strict)
    oss = chat_tokenizer(tmp_path, HARMONY, HARMONY_SPECIALS, end="<|return|>", settings=settings)
    uses = [{"id": x, "function": {"name": f"look_{x}", "arguments": {}}} for x in "ab"]
    results = [{"role": "tool", "content": f"at {x}", "tool_call_id": x} for x in "ab"]
    rendered = oss.rendered([USER, {"role": "assistant", "tool_calls": uses}, *results], None, {})

    order = [rendered.text.find(text) for text in ("to=functions.look_a", "at a", "look_b", "at b")]
    if is_strict:
        assert (-1 in order, rendered.notes) == (True, ())
    else:
        assert (-1 not in order, order) == (True, sorted(order))
        assert rendered.notes == ("gave each tool call a message of its own",)
        assert oss.rendered([USER], None, {}).notes == ()


def test_channels_round_trip(tmp_path):
    oss = chat_tokenizer(tmp_path, HARMONY, HARMONY_SPECIALS, end="<|return|>")
    says = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "There.<|return|>"
    )
    text, thought, _ = answer(oss, [USER], says, TOOLS)
    back = {"role": "assistant", "content": text, "reasoning_content": thought}

    assert (text, thought) == ("There.", "Hm.")
    assert "<|channel|>final<|message|>There.<|end|>" in oss.render([USER, back, USER], TOOLS, {})


@pytest.mark.parametrize("content", ["", "I look."])
def test_thought_with_a_call_round_trips(tmp_path, content):
    oss = chat_tokenizer(tmp_path, HARMONY, HARMONY_SPECIALS, end="<|return|>")
    says = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.bash<|channel|>"
        'commentary json<|message|>{"command": "ls"}<|call|>'
    )
    _, thought, (call,) = answer(oss, [USER], says, TOOLS)
    reply = calling(json.loads(call.arguments), content, call.id)
    messages = [USER, {**reply, "reasoning_content": thought}, {**RESULT, "tool_call_id": call.id}]
    text = oss.render(messages, TOOLS, {})

    assert "Hm." in text
    assert content in text
    if not content:
        assert text.startswith(oss.render([USER], TOOLS, {}).removesuffix("<|start|>assistant"))
        assert f"<|start|>assistant{says}" in text


def roles(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_later_system_message_is_folded_and_noted(tmp_path):
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    early = roles(("system", "s"), ("user", "a"), ("system", "t"))
    rendered = mistral.rendered(early, None, {})
    more = [*early, *roles(("assistant", "b"), ("user", "c"), ("system", "u"), ("user", "d"))]
    later = mistral.rendered(more, None, {})

    assert rendered.text == "[SYSTEM]s[INST]a\n\nt[/INST]"
    assert rendered.notes == ("folded later system messages into the user's",)
    assert later.text.startswith(f"{rendered.text}b</s>")
    assert later.notes == (*rendered.notes, "merged messages of the user")


def test_consecutive_user_messages_are_merged(tmp_path):
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    rendered = mistral.rendered(roles(("user", "a"), ("user", "b")), None, {})

    assert (rendered.text, rendered.notes) == (
        "[INST]a\n\nb[/INST]",
        ("merged messages of the user",),
    )


def test_answer_is_inserted_between_tool_result_and_user(tmp_path):
    """Templates in which roles alternate count no calls and results, so see the user twice."""
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    called = [USER, calling({"command": "ls"}), RESULT]
    interrupted = [*called, *roles(("user", "a"))]
    rendered = mistral.rendered(interrupted, None, {})
    later = mistral.rendered([*interrupted, *roles(("assistant", "b"), ("user", "c"))], None, {})

    assert rendered.notes == ("put an answer between a tool's result and the user's message",)
    assert rendered.text == mistral.render(called, None, {}) + "OK.</s>[INST]a[/INST]"
    assert later.text == rendered.text + "b</s>[INST]c[/INST]"
    reminded = mistral.rendered([*called, *roles(("system", "r"))], None, {})
    assert reminded.text.endswith("OK.</s>[INST]r[/INST]")


def test_conversation_starting_with_a_greeting_is_rendered(tmp_path):
    greeted = roles(("assistant", "I am Mira."), ("user", "a"))
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>")
    rendered = mistral.rendered(greeted, None, {})
    ruled = mistral.rendered([*roles(("system", "s")), *greeted], None, {})
    gemma = chat_tokenizer(tmp_path, GEMMA2, ("<start_of_turn>",), end="<end_of_turn>")
    folded = gemma.rendered([*roles(("system", "s")), *greeted], None, {})

    assert rendered.text == "[INST]Hello.[/INST]I am Mira.</s>[INST]a[/INST]"
    assert rendered.notes == ("put a message of the user before the first answer",)
    assert ruled.text == f"[SYSTEM]s{rendered.text}"
    assert folded.text.startswith("<start_of_turn>user\ns<end_of_turn>\n<start_of_turn>model\nI am")


def test_strict_settings_refuse_instead_of_folding(tmp_path):
    settings = FormatSettings(is_strict=True)
    mistral = chat_tokenizer(tmp_path, MISTRAL, MISTRAL_SPECIALS, end="</s>", settings=settings)
    with pytest.raises(RejectedError) as caught:
        mistral.rendered(roles(("user", "a"), ("user", "b")), None, {})

    assert caught.value.code == "template_refused"


def test_system_message_is_folded_into_user_for_templates_without_it(tmp_path):
    gemma = chat_tokenizer(tmp_path, GEMMA2, ("<start_of_turn>",), end="<end_of_turn>")
    rendered = gemma.rendered(roles(("system", "s"), ("user", "a")), None, {})

    assert rendered.text == "<start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>model\n"
    assert rendered.notes == ("folded the system message into the user's",)


def call_of(id_, name, text=""):
    use = {"type": "function", "id": id_, "function": {"name": name, "arguments": {"q": 7}}}
    return {"role": "assistant", "content": text, "tool_calls": [use]}


def result_of(id_, text):
    return {"role": "tool", "tool_call_id": id_, "content": text}


def test_calls_are_rendered_as_text_for_templates_without_calls(tmp_path):
    gemma = chat_tokenizer(tmp_path, GEMMA2, ("<start_of_turn>",), end="<end_of_turn>")
    messages = [*roles(("user", "a")), call_of("c1", "look", "I look."), result_of("c1", "found")]
    rendered = gemma.rendered(messages, None, {})
    later = gemma.rendered([*messages, *roles(("assistant", "b"), ("user", "c"))], None, {})
    interrupted = gemma.rendered([*messages, *roles(("user", "stop"))], None, {})

    assert rendered.text == (
        "<start_of_turn>user\na<end_of_turn>\n"
        '<start_of_turn>model\nI look.\n\nCalled look with {"q": 7}<end_of_turn>\n'
        "<start_of_turn>user\nResult of look:\nfound<end_of_turn>\n<start_of_turn>model\n"
    )
    assert rendered.notes == ("wrote tool calls and their results as text",)
    assert later.text.startswith(rendered.text)
    assert interrupted.text.count("<start_of_turn>user") == 2
    assert "found" in interrupted.text
    assert "stop" in interrupted.text


@pytest.mark.parametrize("dropped", ["tool_calls", "result", "both"])
def test_dropped_calls_are_rendered_as_text_and_noted(tmp_path, dropped):
    call = "" if dropped != "result" else "{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"
    shown = "true" if dropped == "tool_calls" else "m.role != 'tool'"
    template = (
        f"{{% for m in messages %}}{{% if {shown} %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{call}"
        "{% endif %}{% endfor %}"
    )
    model = chat_tokenizer(tmp_path, template, ())
    messages = [*roles(("user", "a")), call_of("c1", "look"), result_of("c1", "found")]
    rendered = model.rendered(messages, None, {})

    assert rendered.text == (
        '[user]a[assistant]Called look with {"q": 7}[user]Result of look:\nfound'
    )
    assert rendered.notes == ("wrote tool calls and their results as text",)
    strict = chat_tokenizer(tmp_path, template, (), settings=FormatSettings(is_strict=True))
    assert "Called" not in strict.rendered(messages, None, {}).text


def test_dropped_system_message_is_folded_and_noted(tmp_path):
    dropping = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    model = chat_tokenizer(tmp_path, dropping, ())
    rendered = model.rendered(roles(("system", "s"), ("user", "a"), ("system", "late")), None, {})

    assert "late" in rendered.text
    assert rendered.notes


def test_request_options_override_the_operators(tmp_path):
    settings = FormatSettings(options={"enable_thinking": False})
    model = chat_tokenizer(tmp_path, QWEN3, QWEN_SPECIALS, settings=settings)

    assert "<think>" in model.render([USER], None, {})
    assert "<think>" not in model.render([USER], None, {"enable_thinking": True})


# As Gemma 4's and EXAONE 4's: they think only on request.
QUIET = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_template_default_for_thinking_holds_unless_set(tmp_path, qwen):
    quiet = chat_tokenizer(tmp_path / "quiet", QUIET, QWEN_SPECIALS)
    settings = FormatSettings(options={"enable_thinking": True})
    chosen = chat_tokenizer(tmp_path / "chosen", QUIET, QWEN_SPECIALS, settings=settings)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    null = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]

    for messages in ([USER], null):
        assert quiet.render(messages, None, {}).endswith("</think>\n\n")
        assert chosen.render(messages, None, {}).endswith("<think>\n")
        for model in (quiet, chosen):
            assert model.render(messages, None, {"enable_thinking": True}).endswith("<think>\n")
            off = model.render(messages, None, {"enable_thinking": False})
            assert off.endswith("</think>\n\n")
    assert "<think>" not in qwen.render([USER], None, {}), "the template opens a thought by default"


def test_reasoning_effort_enables_thinking_unless_operator_forbids_it(tmp_path):
    quiet = chat_tokenizer(tmp_path / "quiet", QUIET, QWEN_SPECIALS)
    settings = FormatSettings(options={"enable_thinking": False})
    forbidden = chat_tokenizer(tmp_path / "forbidden", QUIET, QWEN_SPECIALS, settings=settings)
    high = {"reasoning_effort": "high"}

    assert quiet.render([USER], None, {"thinking_budget": 64}).endswith("<think>\n")
    assert quiet.render([USER], None, {"thinking_budget": 0}).endswith("</think>\n\n")
    assert quiet.render([USER], None, high).endswith("<think>\n")
    assert quiet.render([USER], None, {**high, "enable_thinking": False}).endswith("</think>\n\n")
    assert forbidden.render([USER], None, high).endswith("</think>\n\n")


def test_effort_none_disables_thinking(qwen):
    assert "<think>\n\n</think>" in qwen.render([USER], None, {"reasoning_effort": "none"})
    assert "<think>" not in qwen.render([USER], None, {"reasoning_effort": "high"})


def test_operator_settings_choose_the_call_parser(tmp_path):
    settings = FormatSettings(calls="qwen3_coder", thoughts="none", template=CODER)
    model = chat_tokenizer(tmp_path, None, QWEN_SPECIALS, settings=settings)
    says = (
        "<think><tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>"
    )
    text, thought, calls = answer(model, [USER], says, TOOLS)

    assert model.render([USER], None, {}).startswith("<|im_start|>user\n")
    assert (text, thought, calls[0].name) == ("<think>", "", "bash")


@pytest.mark.parametrize(
    "settings", [FormatSettings(calls="nonsense"), FormatSettings(thoughts="nonsense")]
)
def test_unknown_format_name_is_fatal(tmp_path, settings):
    with pytest.raises(FatalError, match="nonsense"):
        chat_tokenizer(tmp_path, QWEN3, QWEN_SPECIALS, settings=settings)


def test_mlx_lm_parsers_can_be_named(tmp_path):
    model = chat_tokenizer(
        tmp_path, QWEN3, QWEN_SPECIALS, settings=FormatSettings(calls="pythonic")
    )

    assert model.format.calls.starts == ("<|tool_call_start|>",)


def test_raw_completion_is_shown_verbatim(qwen):
    """Raw completions: tags stay in the text, so that it can be sent back."""
    says = '<think>\nHm\n</think>\n\n<tool_call>\n{"name": "bash"}</tool_call>\n<|im_end|>'
    completion = Answer(qwen, "Once <think>", (), TOOLS, is_chat=False)
    shown = [completion.push(token) for token in qwen.encode(says).ids]
    shown.append(completion.finish(stopped=False))

    assert "".join(each.text for each in shown) == says.removesuffix("<|im_end|>")
    assert not any(each.reasoning or each.calls for each in shown)


def test_reserved_options_cover_all_parameters_of_template_rendering():
    """Clients could set any parameter of the library that is not reserved."""
    taken = {
        name
        for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert taken - {"documents"} <= RESERVED_OPTIONS
