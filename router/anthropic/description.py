"""OpenAPI descriptions of Anthropic's routes."""

from typing import Final

from router.anthropic.request import MESSAGES_BODY, PROMPT_BODY
from router.api.openapi import (
    EDIT_ANSWER_HEADERS,
    EDIT_HEADERS,
    FLAG,
    JSON,
    WRITES,
    Described,
    answer,
    array,
    described_turn,
    integer,
    one_of,
    ref,
    text,
    with_macfabric_field,
    with_rare,
)
from router.http.schema import Schema, nullable
from router.http.turn_headers import IGNORED_HEADER

_ERRORS: Final = tuple(status for status in WRITES if status != 503)
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
    dropped_messages=integer(1),
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
        type=one_of("model"),
        id=text(),
        display_name=text(),
        created_at=text(format="date-time"),
        lifecycle=one_of("active"),
        max_input_tokens=nullable(integer(1)),
        max_tokens=nullable(integer(1)),
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
        body=MESSAGES_BODY.schema(),
        errors=_ERRORS,
        error="AnthropicError",
    ),
    Described(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic",
        "Counts the tokens of such a turn by the model's own tokenizer.",
        {JSON: _COUNTED},
        _ERRORS,
        body=with_macfabric_field(PROMPT_BODY.schema()),
        parameters=EDIT_HEADERS,
        rare_headers={**EDIT_ANSWER_HEADERS, IGNORED_HEADER: text()},
        error="AnthropicError",
    ),
)
