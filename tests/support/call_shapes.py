"""Model families as agents see them: the shapes of their templates and of their answers.

Written for these tests; only the shape is theirs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.template_shapes import Shape

Arguments = dict[str, Any]
_SEPARATOR = "]<]minimax[>["


@dataclass(frozen=True)
class CallShape:
    """A template, and the syntax in which its model writes thoughts and calls."""

    name: str
    template: str
    specials: tuple[str, ...]
    end: str
    call: Callable[[str, Arguments], str]
    section: tuple[str, str] = ("", "")  # around all calls of an answer
    between: str = "\n"  # calls
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    opens: tuple[bool, bool] = (False, False)  # whether the prompt opens a thought: first, later
    has_lines: bool = True  # a thought may begin and end with any line breaks

    def calls(self, *calls: tuple[str, Arguments]) -> str:
        """Write calls as the model does."""
        start, end = self.section
        return start + self.between.join(self.call(*call) for call in calls) + end

    def thinks(self, thought: str, *, after_result: bool) -> str:
        """Write a thought; its opening mark may already be in the prompt."""
        start, end = self.thought
        return ("" if self.opens[after_result] else start) + thought + end

    @property
    def shape(self) -> Shape:
        """Return the shape without a model, to write a tokenizer from."""
        return Shape(self.name, self.template, self.specials, self.end, lambda _: "")


def _json_call(name: str, arguments: Arguments) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _coder_call(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_spelled(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _seed_call(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f"<parameter={key}>{_spelled(value)}</parameter>\n" for key, value in arguments.items()
    )
    return f"<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>"


def _glm_call(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_spelled(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{parameters}</tool_call>"


def _m2_call(name: str, arguments: Arguments) -> str:
    parameters = "".join(
        f'<parameter name="{key}">{_spelled(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{parameters}</invoke>\n'


def _m3_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_m3_element(key, inner) for key, inner in value.items())
    if isinstance(value, list):
        return "".join(_m3_element("item", inner) for inner in value)
    return _spelled(value)


def _m3_element(key: str, value: Any) -> str:
    return f"{_SEPARATOR}<{key}>{_m3_value(value)}{_SEPARATOR}</{key}>"


def _m3_call(name: str, arguments: Arguments) -> str:
    parameters = _m3_value(arguments)
    return f'{_SEPARATOR}<invoke name="{name}">{parameters}{_SEPARATOR}</invoke>\n'


def _deepseek_call(name: str, arguments: Arguments) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return f"{head}{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def _gemma_call(name: str, arguments: Arguments) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>"


def _mistral_call(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def _kimi_call(name: str, arguments: Arguments) -> str:
    mark = "<|tool_call_argument_begin|>"
    return f"<|tool_call_begin|>functions.{name}:0{mark}{json.dumps(arguments)}<|tool_call_end|>"


def _harmony_call(name: str, arguments: Arguments) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}<|message|>{json.dumps(arguments)}"


_ASSISTANT = """{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}"""
_LOOP = "{%- for m in messages %}"


def _chatml(calls: str, opening: str) -> str:
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        + _LOOP
        + "<|im_start|>{{ m.role }}\n"
        + _ASSISTANT
        + "{%- for c in m.tool_calls or [] %}\n"
        + calls
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        + "{%- if add_generation_prompt %}<|im_start|>assistant\n"
        + opening
        + "{% endif %}"
    )


_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_QWEN = (*_CHATML, "<tool_call>", "</tool_call>")
_JSON = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>"
)


def _tagged(call: str, argument: str, end: str) -> str:
    loop = "{% for k, v in c.function.arguments | items %}"
    value = "{{ v if v is string else v | tojson }}"
    return call + loop + argument.replace("VALUE", value) + "{% endfor %}" + end


_CODER = _tagged(
    "<tool_call>\n<function={{ c.function.name }}>\n",
    "<parameter={{ k }}>\nVALUE\n</parameter>\n",
    "</function>\n</tool_call>",
)
_SEED = _tagged(
    "<seed:tool_call>\n<function={{ c.function.name }}>\n",
    "<parameter={{ k }}>VALUE</parameter>\n",
    "</function>\n</seed:tool_call>",
)
_M2 = _tagged(
    '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n',
    '<parameter name="{{ k }}">VALUE</parameter>\n',
    "</invoke>\n</minimax:tool_call>",
)
_M3 = _tagged(
    'SEP<tool_call>\nSEP<invoke name="{{ c.function.name }}">',
    "SEP<{{ k }}>VALUESEP</{{ k }}>",
    "SEP</invoke>\nSEP</tool_call>",
).replace("SEP", _SEPARATOR)
_GLM = _tagged(
    "<tool_call>{{ c.function.name }}\n",
    "<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "</tool_call>",
)
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
)
_KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)

# After a tool's result nothing opens a message: the answer continues the one that called.
_DEEPSEEK = (
    "<bos>{{ tools | tojson if tools }}{%- set ns = namespace(is_tool=false) %}"
    + _LOOP
    + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% set ns.is_tool = false %}"
    "{%- elif m.role == 'tool' %}{% set ns.is_tool = true %}<｜tool▁outputs▁begin｜>"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    "{%- elif m.role == 'assistant' %}{{ '' if ns.is_tool else '<｜Assistant｜>' }}"
    "{{ (m.content or '').split('</think>')[-1] }}"
    "{%- for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt and not ns.is_tool %}<｜Assistant｜>OPENING{% endif %}"
)
_DEEPSEEK_MARKS = (
    *("<bos>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
    *("<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
)
# The same, but a thought is opened after the result.
_GEMMA = (
    '{%- macro value(v) -%}{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}'
    "{% endif %}{%- endmacro -%}<bos>{{ tools | tojson if tools }}"
    "{%- set ns = namespace(is_tool=false) %}"
    + _LOOP
    + "{% if m.role == 'tool' %}<|tool_response>response:x{value:<|\"|>{{ m.content }}<|\"|>}"
    "<tool_response|>{% set ns.is_tool = true %}{% else %}"
    "{% if not (m.role == 'assistant' and ns.is_tool) %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{%- set ns.is_tool = false %}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}"
    "{{ k }}:{{ value(v) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
    "{{ m.content or '' }}{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if not ns.is_tool %}<|turn>model\n{% endif %}"
    "{% if ns.is_tool %}<|channel>thought\n{% endif %}{% endif %}"
)
_GEMMA_MARKS = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    *("<channel|>", "<|tool_response>", "<tool_response|>"),
)
_MISTRAL = (
    "<s>{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    + _LOOP
    + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
_HARMONY = (
    "<|start|>system<|message|>Channels: analysis, commentary, final<|end|>"
    "{{ tools | tojson if tools }}"
    + _LOOP
    + "{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "<|return|>",
)

CALL_SHAPES = {
    shape.name: shape
    for shape in (
        CallShape("qwen3", _chatml(_JSON, ""), _QWEN, "<|im_end|>", _json_call),
        CallShape(
            "qwen3_coder",
            _chatml(_CODER, "<think>\n"),
            _QWEN,
            "<|im_end|>",
            _coder_call,
            opens=(True, True),
        ),
        CallShape(
            "glm",
            _chatml(_GLM, ""),
            (*_QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<|im_end|>",
            _glm_call,
        ),
        CallShape(
            "minimax_m2",
            _chatml(_M2, "<think>\n"),
            (*_CHATML, "<minimax:tool_call>", "</minimax:tool_call>"),
            "<|im_end|>",
            _m2_call,
            section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            between="",
            opens=(True, True),
        ),
        CallShape(
            "minimax_m3",
            _chatml(_M3, "<mm:think>")
            .replace("<think>", "<mm:think>")
            .replace("/think", "/mm:think"),
            (*_CHATML[:2], "<mm:think>", "</mm:think>", _SEPARATOR),
            "<|im_end|>",
            _m3_call,
            section=(f"{_SEPARATOR}<tool_call>\n", f"{_SEPARATOR}</tool_call>"),
            between="",
            thought=("<mm:think>", "</mm:think>"),
            opens=(True, True),
        ),
        CallShape(
            "seed_oss",
            _chatml(_SEED, "").replace("think>", "seed:think>"),
            (
                *_CHATML[:2],
                "<seed:think>",
                "</seed:think>",
                "<seed:tool_call>",
                "</seed:tool_call>",
            ),
            "<|im_end|>",
            _seed_call,
            thought=("<seed:think>", "</seed:think>"),
        ),
        CallShape(
            "kimi_k2",
            _chatml(_KIMI, ""),
            (*_CHATML, *_KIMI_MARKS),
            "<|im_end|>",
            _kimi_call,
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            between="",
        ),
        CallShape(
            "deepseek_v3",
            _DEEPSEEK.replace("OPENING", ""),
            _DEEPSEEK_MARKS,
            "<｜end▁of▁sentence｜>",
            _deepseek_call,
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        CallShape(
            "deepseek_r1",
            _DEEPSEEK.replace("OPENING", "<think>\n"),
            _DEEPSEEK_MARKS,
            "<｜end▁of▁sentence｜>",
            _deepseek_call,
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            opens=(True, False),
        ),
        CallShape(
            "gemma4",
            _GEMMA,
            _GEMMA_MARKS,
            "<turn|>",
            _gemma_call,
            between="",
            thought=("<|channel>thought\n", "<channel|>"),
            opens=(False, True),
        ),
        CallShape(
            "mistral",
            _MISTRAL,
            (
                *(
                    "<s>",
                    "</s>",
                    "[INST]",
                    "[/INST]",
                    "[TOOLS]",
                    "[/TOOLS]",
                    "[TOOL_CALLS]",
                    "[ARGS]",
                ),
                *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
            ),
            "</s>",
            _mistral_call,
            between="",
            thought=("[THINK]", "[/THINK]"),
        ),
        CallShape(
            "harmony",
            _HARMONY,
            _HARMONY_MARKS,
            "<|return|>",
            _harmony_call,
            between="<|end|>",
            thought=("<|channel|>analysis<|message|>", "<|end|>"),
        ),
    )
}
