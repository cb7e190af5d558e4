"""Model families for SDK tests, each with its own syntax of thoughts, calls and ends."""

import json

from tests.support.chat_models import HARMONY, HARMONY_SPECIALS
from tests.support.template_shapes import SHAPES, ScriptedAnswer, Shape


def _channels(reply: ScriptedAnswer) -> str:
    thought = f"<|channel|>analysis<|message|>{reply.thought}<|end|><|start|>assistant"
    if reply.call is None:
        return f"{thought}<|channel|>final<|message|>{reply.text}"
    name, arguments = reply.call
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{thought}{head}{json.dumps(arguments)}<|call|>"


GPT_OSS = Shape(
    "gpt_oss", HARMONY, HARMONY_SPECIALS, "<|return|>", _channels, end_of_call="<|call|>"
)
FAMILIES = {
    "a thought that the prompt opens": (SHAPES["thought_opened"], "full"),
    "a thought of its own accord": (SHAPES["thinks"], "full"),
    "recurrent": (SHAPES["thought_opened"], "recurrent"),
    "tokens for roles": (SHAPES["role_tokens"], "full"),
    "channels": (GPT_OSS, "full"),
}
