"""Trials of templates with a call and a thought: those not read back are reported."""

import pytest

from node.dialect.format_selection import FormatSettings
from tests.node.mlx.test_answer_start import USER, answer
from tests.node.mlx.test_family_templates import FAMILIES
from tests.support.call_shapes import CALL_SHAPES
from tests.support.chat_models import CODER, MISTRAL, QWEN3, QWEN_SPECIALS, R1, chat_tokenizer

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[[thinks]]{{ m.reasoning_content }}[[/thinks]]{% endif %}"
    "{{ m.content or '' }}{%- for c in m.tool_calls or [] %}START{{ c.function.name }}("
    "{{ c.function.arguments | tojson }})END{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = CHATML.replace("START", "[[call]]").replace("END", "[[/call]]")
LLAMA4 = (
    "{%- for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|python_start|><|python_end|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}<|eot|>{% endfor %}"
    "{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
# What many families write around JSON, and this one around something else.
COMMON = CHATML.replace("START", "<tool_call>").replace("END", "</tool_call>")
KNOWN = {
    **{name: (shape.template, shape.specials) for name, shape in CALL_SHAPES.items()},
    **{f"small {name}": (shape.template, shape.specials) for name, shape in FAMILIES.items()},
    "a small Qwen": (QWEN3, QWEN_SPECIALS),
    "a small Coder": (CODER, QWEN_SPECIALS),
    "a small Mistral": (MISTRAL, ()),
    "a small R1": (R1, ()),
    "a small Llama 4": (LLAMA4, ()),
    "no calls": ("{% for m in messages %}{{ m.content }}{% endfor %}", ()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_formats_pass_the_trial(tmp_path, name):
    template, specials = KNOWN[name]
    model = chat_tokenizer(tmp_path, template, specials)
    assert (model.unread_parts, model.warning) == ((), None)


@pytest.mark.parametrize("template", [OWN, COMMON], ids=["own", "common"])
def test_unknown_format_is_reported_and_read_as_text(tmp_path, template):
    model = chat_tokenizer(tmp_path, template, ("<|im_start|>", *QWEN_SPECIALS[4:]))
    assert model.unread_parts == ("tool calls", "thoughts")
    assert "node.tool_parser and node.reasoning_parser" in model.warning
    call = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    says = f"[[thinks]]Hm[[/thinks]][[call]]read({{}})[[/call]]{call}"
    assert answer(model, [USER], f"{says}<|im_end|>") == (says, "", [])


def test_unknown_call_marks_alone_are_reported(tmp_path):
    model = chat_tokenizer(tmp_path, OWN.replace("m.reasoning_content", "m.oh"), ("<|im_start|>",))
    assert model.unread_parts == ("tool calls",)
    assert "reasoning_parser" not in model.warning


def test_formats_set_by_the_operator_are_not_tried(tmp_path):
    settings = FormatSettings(calls="json", thoughts="none")
    model = chat_tokenizer(tmp_path, COMMON, QWEN_SPECIALS, settings=settings)
    assert (model.format.calls.name, model.warning) == ("json", None)
