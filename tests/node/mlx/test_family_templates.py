"""Small family templates: recognized, their answers read, and rendered back unchanged.

Written for these tests; only their structure is a family's.
"""

from dataclasses import dataclass

import pytest

from tests.node.mlx.test_chat_tokenizer import RESULT, TOOLS, USER, answer
from tests.support.chat_models import (
    FUNCTION_GEMMA,
    FUNCTION_GEMMA_SPECIALS,
    GEMMA4,
    GEMMA4_SPECIALS,
    KIMI3,
    KIMI3_SPECIALS,
    MINICPM,
    MINICPM_SPECIALS,
    chat_tokenizer,
)

LOOP = "{%- for m in messages %}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"


@dataclass(frozen=True)
class FamilyTemplate:
    """A family's form of a turn, and of an answer with a thought, a text and a call."""

    template: str
    specials: tuple[str, ...]
    end: str
    says: str
    calls: str
    thought: str = ""
    text: str = ""
    comes_back: str = ""  # the part of the answer that its template repeats; else all


COMMAND_R = FamilyTemplate(
    LOOP
    + "{% if m.role == 'assistant' %}<|START|><|BOT|>{{ m.content or '' }}"
    + "{% if m.tool_calls %}{{ '\n' }}Action: ```json\n[{% for c in m.tool_calls %}"
    + "{{ '\n' }}    {\n"
    + '        "tool_name": "{{ c.function.name }}",\n        "parameters": '
    + ARGUMENTS
    + "\n    }{% if not loop.last %},{% endif %}{% endfor %}{{ '\n' }}]\n```{% endif %}<|END|>"
    + "{% else %}<|START|><|{{ m.role }}|>{{ m.content }}<|END|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|START|><|BOT|>{% endif %}",
    ("<|START|>", "<|BOT|>", "<|user|>", "<|tool|>"),
    "<|END|>",
    'Plan: look.\nAction: ```json\n[\n    {\n        "tool_name": "bash",\n        "parameters": '
    '{"command": "ls"}\n    }\n]\n```',
    "command_r",
    text="Plan: look.",
)
NEMOTRON = FamilyTemplate(
    LOOP
    + "{% if m.role == 'assistant' %}<S11>Assistant\n{{ (m.content or '').strip() }}"
    + "{% if m.tool_calls %}{% if m.content %}{{ '\n' }}\n{% endif %}<TOOLCALL>["
    + '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    + ARGUMENTS
    + "}{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}{{ '\n' }}<S12>\n\n"
    + "{% else %}<S11>User\n{{ m.content }}\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<S11>Assistant\n<think>\n\n{% endif %}",
    ("<S11>",),
    "<S12>",
    'Hm.\n</think>\n\nSo.\n\n<TOOLCALL>[{"name": "bash", "arguments": {"command": "ls"}}]'
    "</TOOLCALL>\n",
    "nemotron",
    "Hm.",
    "So.",
    'So.\n\n<TOOLCALL>[{"name": "bash", "arguments": {"command": "ls"}}]</TOOLCALL>\n',
)
HUNYUAN = FamilyTemplate(
    LOOP
    + "{% if m.role == 'assistant' %}{{ m.content or '' }}{% if m.tool_calls %}<tool_calls>["
    + '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    + ARGUMENTS
    + "}{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>{% endif %}<|eos|>"
    + "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response><|extra_0|>"
    + "{% else %}<|bos|>{{ m.content }}<|extra_0|>{% endif %}{% endfor %}"
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n"
    + "{% endif %}",
    ("<|bos|>", "<|extra_0|>", "<think>", "</think>"),
    "<|eos|>",
    '<tool_calls>[{"name": "bash", "arguments": {"command": "ls"}}]</tool_calls>',
    "hunyuan",
)
LONGCAT = FamilyTemplate(
    LOOP
    + "{% if m.role == 'assistant' %} ASSISTANT:{% if m.reasoning_content %}<longcat_think>\n"
    + "{{ m.reasoning_content }}\n</longcat_think>\n{% endif %}{{ m.content or '' }}"
    + "{% for c in m.tool_calls or [] %}{{ '\n' }}<longcat_tool_call>{{ c.function.name }}\n"
    + "{% for k, v in c.function.arguments.items() %}<longcat_arg_key>{{ k }}</longcat_arg_key>\n"
    + "<longcat_arg_value>{{ v }}</longcat_arg_value>\n{% endfor %}</longcat_tool_call>"
    + "{% endfor %}</longcat_s>{% else %} USER:{{ m.content }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %} ASSISTANT:{% endif %}",
    ("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
    "</longcat_s>",
    "<longcat_think>\nHm.\n</longcat_think>\nSo.\n<longcat_tool_call>bash\n<longcat_arg_key>"
    "command</longcat_arg_key>\n<longcat_arg_value>ls</longcat_arg_value>\n</longcat_tool_call>",
    "longcat",
    "Hm.",
    "So.",
)
APERTUS = FamilyTemplate(
    LOOP
    + "{% if m.role == 'assistant' %}<|assistant_start|>{% if m.reasoning_content %}"
    + "<|inner_prefix|>{{ m.reasoning_content }}<|inner_suffix|>{% endif %}{{ m.content or '' }}"
    + "{% if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}"
    + '{"{{ c.function.name }}": '
    + ARGUMENTS
    + "}{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}<|assistant_end|>"
    + "{% else %}<|user_start|>{{ m.content }}<|user_end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|assistant_start|>{% endif %}",
    (
        *("<|assistant_start|>", "<|user_start|>", "<|user_end|>", "<|inner_prefix|>"),
        *("<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "<|assistant_end|>",
    '<|inner_prefix|>Hm.<|inner_suffix|>So.<|tools_prefix|>[{"bash": {"command": "ls"}}]'
    "<|tools_suffix|>",
    "apertus",
    "Hm.",
    "So.",
)
GEMMA = FamilyTemplate(
    GEMMA4,
    GEMMA4_SPECIALS,
    "<turn|>",
    '<|tool_call>call:bash{command:<|"|>ls<|"|>}<tool_call|>',
    "gemma4",
)
FUNCTIONS = FamilyTemplate(
    FUNCTION_GEMMA,
    FUNCTION_GEMMA_SPECIALS,
    "<end_of_turn>",
    "<start_function_call>call:bash{command:<escape>ls<escape>}<end_function_call>",
    "function_gemma",
)
MINI = FamilyTemplate(
    MINICPM,
    MINICPM_SPECIALS,
    "<|im_end|>",
    '<function name="bash"><param name="command">ls</param></function>',
    "minicpm5",
)
KIMI = FamilyTemplate(
    KIMI3,
    KIMI3_SPECIALS,
    "<|end_of_msg|>",
    'So.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>'
    '<|open|>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    "kimi_k3",
    text="So.",
)
FAMILIES = {
    "gemma4": GEMMA,
    "function_gemma": FUNCTIONS,
    "minicpm": MINI,
    "kimi3": KIMI,
    "command_r": COMMAND_R,
    "nemotron": NEMOTRON,
    "hunyuan": HUNYUAN,
    "longcat": LONGCAT,
    "apertus": APERTUS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_answer_is_read_and_rendered_back_unchanged(tmp_path, name):
    family = FAMILIES[name]
    model = chat_tokenizer(tmp_path, family.template, family.specials, end=family.end)
    assert model.format.calls is not None
    assert model.format.calls.name == family.calls

    text, thought, (call,) = answer(model, [USER], family.says + family.end, TOOLS)
    assert (text, thought, call.name) == (family.text, family.thought, "bash")
    assert call.arguments.replace(" ", "") == '{"command":"ls"}'

    function = {"name": call.name, "arguments": {"command": "ls"}}
    back = {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"type": "function", "id": call.id, "function": function}],
        **({"reasoning_content": thought} if thought else {}),
    }
    prompt = model.render([USER], TOOLS, {})
    again = model.render([USER, back, {**RESULT, "tool_call_id": call.id}], TOOLS, {})
    if family.comes_back:
        assert family.comes_back in again
    else:
        assert again.startswith(prompt + family.says + family.end)
