"""Small tokenizers with templates in the shapes of known families, written for tests."""

import json
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from node.dialect.format_selection import FormatSettings
from node.mlx.chat_tokenizer import ChatTokenizer


def chat_tokenizer(
    folder: Path,
    template: str | list[dict[str, str]] | None,
    specials: tuple[str, ...],
    *,
    end: str = "<|im_end|>",
    rstrip: bool = False,
    settings: FormatSettings | None = None,
) -> ChatTokenizer:
    """Write a tokenizer of bytes and special tokens, and load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.model = models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    added = dict.fromkeys((*specials, end))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in added]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    wrapper = load(folder)
    return ChatTokenizer(wrapper, settings)


# Shaped as Qwen3's: thoughts of earlier turns are left out, calls are JSON on lines of their own.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and message.reasoning_content %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
QWEN_SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"
)  # fmt: skip
# Shaped as those that open the thought in the prompt, and drop it from the history.
OPENED = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Shaped as Qwen3-Coder's: the template iterates over arguments.
CODER = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n"
    "{%- for name, value in call.function.arguments | items %}\n<parameter={{ name }}>\n{{ value }}"
    "\n</parameter>{% endfor %}\n</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shaped as Mistral's: ids of nine letters and digits, users and assistants in turn.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{{ '[SYSTEM]' }}"
    "{{ messages[0].content }}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{%- set ns = namespace(index=0) %}{% for message in loop_messages %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{%- if (message.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate') }}"
    "{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{%- for message in loop_messages %}"
    "{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{%- if call.id is undefined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{%- elif message.role == 'assistant' %}{{ message.content }}</s>"
    "{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}"
    "{{ message.content }}"
    "[/TOOL_RESULTS]{% else %}{{ raise_exception('Only user and assistant roles are supported, "
    "with the exception of an initial optional system message!') }}{% endif %}{% endfor %}"
)
MISTRAL_SPECIALS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM]"
)  # fmt: skip
# Shaped as R1's distills: a call without content has no end of its own, and needs text arguments.
R1 = (
    "{%- for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{%- elif message.role == 'assistant' and message.content is none %}<｜Assistant｜>"
    "{%- for call in message.tool_calls %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
    "{%- elif message.role == 'assistant' %}<｜Assistant｜>"
    "{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% elif message.role == 'tool' %}<｜tool▁outputs▁begin｜>"
    "{{ message.content }}<｜tool▁outputs▁end｜>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# Shaped as gpt-oss's: channels, and one place for a thought or a text beside a call.
HARMONY = (
    "<|start|>system<|message|>Channels: analysis, commentary, final<|end|>"
    "{%- set ns = namespace(last=none) %}{% for message in messages %}"
    "{%- if message.role == 'assistant' %}{% if message.content is defined and "
    "('<|channel|>analysis<|message|>' in message.content or "
    "'<|channel|>final<|message|>' in message.content) %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags') }}{% endif %}"
    "{%- if message.tool_calls %}{% set ns.last = message.tool_calls[0].function.name %}"
    "{%- if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking with tool calls!') }}"
    "{%- elif message.content or message.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>"
    "{{ message.content or message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ ns.last }}<|channel|>commentary json<|message|>"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% elif message.role == 'tool' %}{% if ns.last is none %}"
    "{{ raise_exception('Message has tool role, but there was no previous call!') }}{% endif %}"
    "<|start|>functions.{{ ns.last }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_SPECIALS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
)  # fmt: skip
# Shaped as Gemma 2's: no system, users and models in turn.
GEMMA2 = (
    "{%- for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_BRACES = (
    "{%- macro value(v) -%}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}{% else %}{{ v }}{% endif %}{%- endmacro -%}"
    "{%- macro arguments(given) -%}{% for k, v in given | dictsort %}{{ k }}:{{ value(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{%- endmacro -%}"
)
# Shaped as Gemma 4's: keys are bare, sorted, and texts between marks.
GEMMA4 = _BRACES.replace("QUOTE", '<|"|>') + (
    "{%- for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{{ '{' }}{{ arguments(c.function.arguments) }}"
    "{{ '}' }}<tool_call|>{% endfor %}{{ m.content or '' }}<turn|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|turn>model\n{% endif %}"
)
GEMMA4_SPECIALS = ("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>')
# Shaped as FunctionGemma's: the same with other marks.
FUNCTION_GEMMA = _BRACES.replace("QUOTE", "<escape>") + (
    "{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<start_function_call>call:{{ c.function.name }}{{ '{' }}{{ arguments(c.function.arguments) }}"
    "{{ '}' }}<end_function_call>{% endfor %}<end_of_turn>\n{% endfor %}"
    "{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
FUNCTION_GEMMA_SPECIALS = (
    "<start_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"
)  # fmt: skip
# Shaped as MiniCPM 5's: texts of several words are quoted.
MINICPM = (
    "{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<function name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
    "<param name=\"{{ k }}\">{% if v is string and ('<' in v or '&' in v) %}"
    "<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>{% endfor %}</function>"
    "{{ '\n' if not loop.last }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MINICPM_SPECIALS = (
    "<|im_start|>", "<think>", "</think>", "<function", "</function>", "<param", "</param>"
)  # fmt: skip
# Shaped as Kimi K3's: everything is an element made of three tokens.
KIMI3 = (
    "{%- macro opened(tag) -%}{{ '<|open|>' + tag + '<|sep|>' }}{%- endmacro -%}"
    "{%- macro closed(tag) -%}{{ '<|close|>' + tag + '<|sep|>' }}{%- endmacro -%}"
    "{%- for m in messages %}{{ opened('message role=\"' + m.role + '\"') }}"
    "{% if m.role == 'assistant' %}{{ opened('response') }}{{ m.content or '' }}"
    "{{ closed('response') }}{% if m.tool_calls %}{{ opened('tools') }}"
    "{% for c in m.tool_calls %}"
    "{{ opened('call tool=\"' + c.function.name + '\" index=\"' + loop.index | string + '\"') }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ opened('argument key=\"' + k + '\" type=\"' + ('string' if v is string else 'number')"
    " + '\"') }}{{ v }}{{ closed('argument') }}{% endfor %}{{ closed('call') }}{% endfor %}"
    "{{ closed('tools') }}{% endif %}{% else %}{{ m.content }}{% endif %}{{ closed('message') }}"
    "<|end_of_msg|>{% endfor %}{%- if add_generation_prompt %}"
    "{{ opened('message role=\"assistant\"') }}{{ opened('response') }}{% endif %}"
)
KIMI3_SPECIALS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
