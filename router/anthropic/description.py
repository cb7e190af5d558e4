"""Anthropic's routes as the OpenAPI document describes them."""

from typing import Final

from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
from router.api.description import (
    ANYTHING,
    EDIT_ANSWER_HEADERS,
    EDIT_HEADERS,
    FLAG,
    JSON,
    OBJECT,
    WRITES,
    Described,
    Schema,
    answer,
    array,
    body,
    described_turn,
    either,
    integer,
    nullable,
    number,
    one_of,
    ref,
    text,
    with_own,
    with_rare,
)
from router.limits import (
    BLOCKS_PER_MESSAGE_MAX,
    CONTEXT_EDITS_MAX,
    KEY_CHARS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOOLS_MAX,
)

_ERRORS: Final = tuple(status for status in WRITES if status != 503)
_BLOCKS: Final = either(
    text(), array(body({"type": text()}, cache_control=OBJECT), BLOCKS_PER_MESSAGE_MAX)
)
_MESSAGE: Final = body({"role": one_of("user", "assistant", "system"), "content": _BLOCKS})
_FORMAT: Final = body({"type": text()}, schema=OBJECT, strict=FLAG)
_REQUIRED: Final = {"model": text(), "messages": array(_MESSAGE, MESSAGES_MAX, 1)}
_AMOUNT: Final = body({"type": text(), "value": integer(0)})
_EDIT: Final = body(
    {"type": text()},
    trigger=_AMOUNT,
    keep=either(text(), body({"type": text()}, value=integer(0))),
    clear_at_least=_AMOUNT,
    exclude_tools=array(text(), TOOLS_MAX),
    clear_tool_inputs=either(FLAG, array(text(), TOOLS_MAX)),
)
_PROMPT: Final = {
    "system": _BLOCKS,
    "tools": array(body({"name": text(minLength=1)}, input_schema=OBJECT), TOOLS_MAX),
    "tool_choice": body({"type": text()}, disable_parallel_tool_use=FLAG, name=text()),
    "thinking": body(
        {"type": one_of("enabled", "adaptive", "disabled")},
        budget_tokens=integer(1, COMPLETION_TOKENS_MAX),
    ),
    "output_config": body(
        {}, effort=one_of("low", "medium", "high", "xhigh", "max"), format=_FORMAT
    ),
    "chat_template_kwargs": OBJECT,
    "cache_control": OBJECT,
    "mcp_servers": ANYTHING,
    "container": ANYTHING,
    "fallbacks": ANYTHING,
    "context_management": body({}, edits=array(_EDIT, CONTEXT_EDITS_MAX)),
    "diagnostics": ANYTHING,
    "speed": ANYTHING,
    "inference_geo": ANYTHING,
    "thread": ANYTHING,
}
_ASKED: Final = body(
    {**_REQUIRED, "max_tokens": integer(0, COMPLETION_TOKENS_MAX)},
    **_PROMPT,
    stream=FLAG,
    temperature=number(0, 1),
    top_p=number(0, 1),
    top_k=integer(0, 1 << 31),
    stop_sequences=array(text(minLength=1, maxLength=STOP_STRING_CHARS_MAX), STOP_STRINGS_MAX),
    service_tier=one_of("auto", "standard_only"),
    metadata=body(
        {}, user_id=text(maxLength=KEY_CHARS_MAX), agent_id=text(maxLength=KEY_CHARS_MAX)
    ),
    output_format=_FORMAT,
)
_USAGE: Final = answer(
    input_tokens=integer(),
    cache_creation_input_tokens=integer(),
    cache_read_input_tokens=integer(),
    output_tokens=integer(),
)
_SAID: Final = answer(
    id=text(),
    type=one_of("message"),
    role=one_of("assistant"),
    model=text(),
    content=array(answer(type=one_of("text", "thinking", "tool_use"))),
    stop_reason=one_of(
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ),
    stop_sequence=nullable(text()),
    usage=_USAGE,
)
_APPLIED: Final = with_rare(
    answer(type=text(), cleared_input_tokens=integer()),
    cleared_tool_uses=integer(1),
    cleared_thinking_turns=integer(1),
)
_COUNTED: Final = with_rare(
    answer(input_tokens=integer()), context_management=answer(original_input_tokens=integer())
)
SCHEMAS: Final[dict[str, Schema]] = {
    "AnthropicError": answer(
        type=one_of("error"), error=answer(type=text(minLength=1), message=text(minLength=1))
    ),
    "AnthropicMessage": with_rare(_SAID, context_management=answer(applied_edits=array(_APPLIED))),
    "AnthropicModel": answer(
        type=one_of("model"), id=text(), display_name=text(), created_at=text(format="date-time")
    ),
    "AnthropicModels": answer(
        data=array(ref("AnthropicModel")),
        has_more=FLAG,
        first_id=nullable(text()),
        last_id=nullable(text()),
    ),
}
DESCRIBED: Final = (
    described_turn(
        "/v1/messages",
        "anthropic",
        "A turn in Anthropic's dialect, streamed or whole.",
        whole=ref("AnthropicMessage"),
        body=_ASKED,
        errors=_ERRORS,
        error="AnthropicError",
    ),
    Described(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic",
        "The tokens of such a turn, by the model's own tokenizer.",
        {JSON: _COUNTED},
        _ERRORS,
        body=with_own(body(_REQUIRED, **_PROMPT)),
        parameters=EDIT_HEADERS,
        rare_headers=EDIT_ANSWER_HEADERS,
        error="AnthropicError",
    ),
)
