"""Chat templates in the families' shapes: marks that they open, and text that they strip or move.

Written for these tests; only the shape is theirs. `say` writes an answer as such a model does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import LLAMA, build_model

VOCABULARY = 800
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {**LLAMA, **_SMALL, "num_hidden_layers": 1},
    "recurrent": {
        **ARCHITECTURES["qwen3_next"],
        **_SMALL,
        "full_attention_interval": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
    },
}


@dataclass(frozen=True)
class ScriptedAnswer:
    """An answer before it is written in a model's syntax."""

    text: str = ""
    thought: str = ""
    call: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens, and the syntax of its model's answers."""

    name: str
    template: str
    specials: tuple[str, ...]
    end: str
    say: Callable[[ScriptedAnswer], str]
    end_of_call: str = ""  # the token that ends an answer with calls, if another one
    eats_space_behind: bool = False  # special tokens absorb the white space after them
    options: dict[str, Any] = field(default_factory=dict)
    has_tools: bool = True


def _json_call(answer: ScriptedAnswer) -> str:
    if answer.call is None:
        return ""
    name, arguments = answer.call
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _plain(answer: ScriptedAnswer) -> str:
    return "\n".join(part for part in (answer.text, _json_call(answer)) if part)


def _thinks(answer: ScriptedAnswer) -> str:
    return f"<think>\n{answer.thought}\n</think>\n\n{_plain(answer)}"


def _continues_thinking(answer: ScriptedAnswer) -> str:
    return f"{answer.thought}\n</think>\n\n{_plain(answer)}"


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_TOOLS_HEAD = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Functions
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
To use one, write <tool_call>
{"name": its name, "arguments": an object}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""

_LAST_QUESTION = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
{% endfor %}"""

_CALLS = """{%- for tool_call in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{% set tool_call = tool_call.function %}
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}"""

_RESULTS = """{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
"""


def _chatml(assistant: str, opening: str) -> str:
    return (
        _TOOLS_HEAD
        + _LAST_QUESTION
        + """{%- for m in messages %}{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
"""
        + assistant
        + _CALLS
        + "<|im_end|>\n"
        + _RESULTS
        + """{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
"""
        + opening
        + "{% endif %}"
    )


_SINCE_QUESTION = """{% if loop.index0 > ns.last %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ (m.content or '').strip('\\n') }}"""
_SENT_BACK = """{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ (m.content or '').strip('\\n') }}"""
_KEEPS = """{% if (preserve_thinking or loop.index0 > ns.last) and m.reasoning_content %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ (m.content or '').strip('\\n') }}"""

_GLM = """[gMASK]<sop>{% if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one by <tool_call>{# tool_call.name #}name</tool_call>{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content and (loop.index0 > ns.last or clear_thinking == false) %}\
<think>{{ m.reasoning_content }}</think>{% else %}</think>{% endif %}{{ (m.content or '').strip() }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""

_R1 = """<bos>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|Assistant|>{{ (m.content or '').split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}
{{ c.function.arguments | tojson }}{% endfor %}<|end|>
{%- elif m.role == 'tool' %}<|result|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

_LLAMA = """<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>

{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}\
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}\
<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""

_GEMMA = """<bos>{% set first = '' %}{% if messages[0].role == 'system' %}\
{% set first = messages[0].content + '\n\n' %}{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}<start_of_turn>\
{{ 'model' if m.role == 'assistant' else 'user' }}
{% if loop.index0 == (1 if first else 0) %}{{ first }}{% for tool in tools or [] %}\
{{ tool | tojson }}
{% endfor %}{% endif %}{{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}
{"name": "{{ c.function.name }}", "args": {{ c.function.arguments | tojson }}}{% endfor %}\
<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_INST = """<s>{% set head = messages[0].content if messages[0].role == 'system' else '' %}
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last %}\
{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ head }}

{{ m.content }}[/INST]{% else %}[INST] {{ m.content }}[/INST]{% endif %}
{%- elif m.role == 'assistant' %} {{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}\
[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>
{%- elif m.role == 'tool' %}[RESULT] {{ m.content }}[/RESULT]{% endif %}{% endfor %}"""

_HARMONY = """<|start|>system<|message|>You answer in channels.<|end|>
{%- if messages[0].role == 'system' or tools %}<|start|>developer<|message|>\
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}
{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>\
{{ (m.content or '').split('final<|message|>')[-1] }}{% for c in m.tool_calls or [] %}\
{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>
{%- elif m.role == 'tool' %}<|start|>tool<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_VICUNA = """{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}
{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content | trim }}</s>
{% else %}{{ m.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

_PHI = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content or '' }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "chatml", _chatml("{{ m.content or '' }}", ""), _CHATML + _TAGS, "<|im_end|>", _plain
        ),
        Shape(
            "thought_opened",
            _chatml(_SINCE_QUESTION, "<think>\n"),
            _CHATML + _TAGS,
            "<|im_end|>",
            _continues_thinking,
        ),
        Shape(
            "thought_closed",
            _chatml(_SENT_BACK, "<think>\n\n</think>\n\n"),
            _CHATML + _TAGS,
            "<|im_end|>",
            _plain,
        ),
        Shape("thinks", _chatml(_SENT_BACK, ""), _CHATML + _TAGS, "<|im_end|>", _thinks),
        Shape(
            "thoughts_kept",
            _chatml(_KEEPS, "<think>\n"),
            _CHATML + _TAGS,
            "<|im_end|>",
            _continues_thinking,
            options={"preserve_thinking": True},
        ),
        Shape(
            "role_tokens",
            _GLM,
            (*_ROLES, *_TAGS),
            "<|user|>",
            lambda answer: f"{answer.thought}</think>{_plain(answer)}",
            end_of_call="<|observation|>",
        ),
        Shape(
            "stripped_by_template",
            _R1,
            ("<bos>", "<|User|>", "<|Assistant|>", "<|call|>", "<|result|>", "<|end|>", *_TAGS[:2]),
            "<|end|>",
            lambda answer: f"{answer.thought}\n</think>\n\n{_plain(answer)}",
        ),
        Shape(
            "headers", _LLAMA, ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"), "<|eot|>", _plain
        ),
        Shape(
            "folded_system",
            _GEMMA,
            ("<bos>", "<start_of_turn>", "<end_of_turn>"),
            "<end_of_turn>",
            _plain,
        ),
        Shape(
            "head_at_last_question",
            _INST,
            ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALL]", "[RESULT]"),
            "</s>",
            lambda answer: " " + _plain(answer),
        ),
        Shape(
            "channels",
            _HARMONY,
            ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
            "<|return|>",
            lambda answer: (
                f"<|channel|>analysis<|message|>{answer.thought}<|end|>"
                f"<|start|>assistant<|channel|>final<|message|>{_plain(answer)}"
            ),
        ),
        Shape(
            "no_tokens",
            _VICUNA,
            ("</s>",),
            "</s>",
            lambda answer: " " + _plain(answer),
            has_tools=False,
        ),
        Shape(
            "eats_space",
            _PHI,
            ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
            "<|end|>",
            _plain,
            eats_space_behind=True,
        ),
    )
}


def write_tokenizer(
    folder: Path, shape: Shape, corpus: list[str], vocabulary: int = VOCABULARY
) -> Tokenizer:
    """Train a tokenizer with the shape's tokens, and write it with the template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[
            AddedToken(text, special=True, normalized=False, rstrip=shape.eats_space_behind)
            for text in shape.specials
        ],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": shape.end,
        "chat_template": shape.template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer


def write_shape(
    folder: Path, shape: Shape, weights: str | dict[str, Any], corpus: list[str], **config: Any
) -> Path:
    """Write a model whose tokenizer and template have this shape; return its folder."""
    sizes = WEIGHTS[weights] if isinstance(weights, str) else weights
    config = {**sizes, **config}
    tokenizer = write_tokenizer(folder, shape, corpus, config["vocab_size"])
    ends = [tokenizer.token_to_id(text) for text in (shape.end, shape.end_of_call) if text]
    config["eos_token_id"] = ends
    weights_by_name = dict(tree_flatten(build_model(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights_by_name, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
