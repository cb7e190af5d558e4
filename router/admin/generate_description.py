"""How `generate` is described; the rest of the room is in `description.py`."""

from typing import Final

from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
from router.api.description import (
    AGENT_ID,
    FLAG,
    OBJECT,
    TURN_HEADERS,
    Parameter,
    answer,
    array,
    body,
    described_turn,
    either,
    integer,
    number,
    one_of,
    text,
)
from router.http.turn_headers import AGENT_HEADER
from router.limits import MESSAGE_NAME_CHARS_MAX, STOP_STRING_CHARS_MAX, STOP_STRINGS_MAX, TOOLS_MAX

AGENT: Final = Parameter("agent", "path", AGENT_ID, "The tenant's own agent.")
_MESSAGE: Final = body(
    {"role": one_of("system", "user", "assistant", "tool"), "content": text()},
    tool_call_id=text(maxLength=MESSAGE_NAME_CHARS_MAX),
)
_FUNCTION: Final = body(
    {"name": text(minLength=1)}, description=text(), parameters=OBJECT, strict=FLAG
)
GENERATE: Final = described_turn(
    "/v1/agents/{agent}/generate",
    "agents",
    "Puts a text or messages behind what the agent remembers, and lets it answer.",
    whole=answer(
        id=AGENT_ID,
        object=one_of("agent.generation"),
        node=text(),
        text=text(),
        reasoning=text(),
        tool_calls=array(answer(id=text(), name=text(), arguments=text())),
        epoch=integer(1),
        finish_reason=one_of("stop", "length", "tool_calls"),
        prompt_tokens=integer(),
        cached_tokens=integer(),
        completion_tokens=integer(),
        durable=FLAG,
    ),
    body=body(
        {},
        text=text(minLength=1),
        messages=array(_MESSAGE, MESSAGES_MAX, 1),
        model=text(),
        max_tokens=integer(1, COMPLETION_TOKENS_MAX),
        temperature=number(0, 2),
        top_p=number(0, 1),
        seed=integer(-(1 << 63), (1 << 64) - 1),
        stop=array(text(minLength=1, maxLength=STOP_STRING_CHARS_MAX), STOP_STRINGS_MAX),
        stream=FLAG,
        chat_template_kwargs=OBJECT,
        tools=array(body({"type": one_of("function"), "function": _FUNCTION}), TOOLS_MAX),
        tool_choice=either(one_of("auto", "none", "required"), OBJECT),
        parallel_tool_calls=FLAG,
    ),
    parameters=(AGENT, *(header for header in TURN_HEADERS if header.name != AGENT_HEADER)),
)
