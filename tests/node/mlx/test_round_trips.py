"""A returned answer is rendered as the very text that the model was fed."""

import json

import pytest

from node.mlx.answer import Answer
from tests.support.chat_models import chat_tokenizer

USER = {"role": "user", "content": "Where?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},
    }
]
CALLS = "{%- for call in message.tool_calls or [] %}{% set f = call.function %}"
THOUGHT = (
    "{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
)
LINE = "{%- if message.content %}{{ message.content }}\n{% endif %}"
ARGUMENTS = "{{ f.arguments | tojson }}"
JSON = '{"command": "ls -l\\n"}'

# The assistant's message in the template, its opening, the model's text, its end.
SHAPES = {
    "coder": (
        LINE + CALLS + "<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments | items %}\n"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
        "{% endfor %}",
        "",
        ("Let me look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n\n</parameter>\n"
        "</function>\n</tool_call>"),
    ),
    "glm": (
        "{{ '\\n' }}" + THOUGHT.replace("\n\n", "\n") + "{% endif %}" + LINE + CALLS
        + "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}\n<arg_key>{{ k }}</arg_key>"
        "\n<arg_value>{{ v }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}",
        "",
        ("\n<think>\nHm.\n</think>\nLook.\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>"
        "ls -l\n</arg_value>\n</tool_call>"),
    ),
    "minimax": (
        THOUGHT + "{% endif %}{{ message.content }}" + "{%- if message.tool_calls %}\n"
        "<minimax:tool_call>{{ '\\n' }}" + CALLS + '<invoke name="{{ f.name }}">\n'
        '{% for k, v in f.arguments | items %}<parameter name="{{ k }}">{{ v }}</parameter>\n'
        "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
        "<think>\n",
        ('Hm.\n</think>\n\nSo.\n<minimax:tool_call>\n<invoke name="bash">\n<parameter name='
         '"command">ls -l</parameter>\n</invoke>\n</minimax:tool_call>'),
    ),
    "seed": (
        "{%- if message.reasoning_content %}<seed:think>{{ message.reasoning_content }}"
        "</seed:think>{% endif %}{{ message.content }}" + CALLS + "\n<seed:tool_call>\n<function="
        "{{ f.name }}>{% for k, v in f.arguments | items %}\n<parameter={{ k }}>{{ v }}</parameter>"
        "{% endfor %}\n</function>\n</seed:tool_call>{% endfor %}",
        "",
        ("<seed:think>Hm.</seed:think>So.\n<seed:tool_call>\n<function=bash>\n<parameter=command>ls"
        "</parameter>\n</function>\n</seed:tool_call>"),
    ),
    "kimi": (
        THOUGHT.replace("\n", "") + "{% endif %}{{ message.content }}{% if message.tool_calls %}"
        "<|tool_calls_section_begin|>" + CALLS + "<|tool_call_begin|>{{ call.id }}"
        "<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}",
        "",
        ("<think>Hm.</think>So.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"),
    ),
    "deepseek": (
        "{{ message.content or '' }}{% if message.tool_calls %}<｜tool▁calls▁begin｜>" + CALLS
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + ARGUMENTS
        + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
        "</think>",
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>" + JSON
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral": (
        "{{ message.content or '' }}" + CALLS + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}"
        "[ARGS]" + ARGUMENTS + "{% endfor %}",
        "",
        f"So.[TOOL_CALLS]bash[CALL_ID]Ab3456789[ARGS]{JSON}",
    ),
    "llama": (
        "{% if message.tool_calls %}" + CALLS + '{"name": "{{ f.name }}", "parameters": '
        + ARGUMENTS + "}{% endfor %}{% else %}<|python_tag|>{{ message.content }}{% endif %}",
        "",
        '{"name": "bash", "parameters": ' + JSON + "}",
    ),
    "granite": (
        "{{ message.content or '' }}{% if message.tool_calls %}<|tool_call|>[" + CALLS
        + '{"name": "{{ f.name }}", "arguments": ' + ARGUMENTS + "}{% endfor %}]{% endif %}",
        "",
        '<|tool_call|>[{"name": "bash", "arguments": ' + JSON + "}]",
    ),
    "text": ("{{ message.content }}", "", "It is there.\n\nGo!\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_returned_answer_is_rendered_as_it_was_fed(tmp_path, name):
    message_template, opens, says = SHAPES[name]
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
        + message_template.replace("%}\n", "%}{{ '\\n' }}")  # Jinja drops a line end after a tag
        + "<|end|>{% else %}{{ message.content }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|assistant|>"
        + opens
        + "{% endif %}"
    )
    model = chat_tokenizer(tmp_path, template, ("<think>", "</think>"), end="<|end|>")
    prompt = model.rendered([USER], TOOLS, {})
    answer = Answer(model, prompt.begun, (), TOOLS, call_seed="operation-1")
    shown = [answer.push(token) for token in model.encode(f"{says}<|end|>").ids]
    shown.append(answer.finish(stopped=False))
    calls = [call for each in shown for call in each.calls]
    back = {"role": "assistant", "content": "".join(each.text for each in shown) or None}
    thought = "".join(each.reasoning for each in shown)
    uses = [
        {"id": c.id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in calls
    ]
    back |= {"reasoning_content": thought} if thought else {}
    back |= {"tool_calls": uses} if uses else {}
    results = [{"role": "tool", "content": "r", "tool_call_id": c.id} for c in calls]
    again = model.render([USER, back, *results], TOOLS, {})

    assert answer.text == f"{says}<|end|>"
    assert bool(calls) == (name != "text")
    assert again.startswith(prompt.text.removesuffix("</think>") + f"{says}<|end|>")
