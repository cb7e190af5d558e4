"""The routes of OpenAI's Responses API as the OpenAPI document describes them."""

from typing import Final

from fabric.limits import MESSAGES_MAX
from router.api.description import (
    ANYTHING,
    FLAG,
    JSON,
    NAMED,
    OBJECT,
    Described,
    Parameter,
    Schema,
    answer,
    array,
    body,
    described_turn,
    either,
    integer,
    listing,
    nullable,
    one_of,
    ref,
    text,
)
from router.limits import INCLUDED_MAX, MESSAGE_NAME_CHARS_MAX, TOOLS_MAX, TOP_LOGPROBS_MAX
from router.openai.description import CHOICE, IDENTITY, SAMPLING, TOKENS

_PARTS: Final = either(text(), array(body({"type": text()}, text=text())))
_ITEM: Final = body(
    {},
    type=text(),
    role=one_of("system", "developer", "user", "assistant"),
    content=_PARTS,
    summary=array(OBJECT),
    call_id=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    id=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    name=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    arguments=text(),
    output=_PARTS,
)
_FORMAT: Final = body(
    {"type": one_of("text", "json_object", "json_schema")}, name=text(), schema=OBJECT, strict=FLAG
)
_ASKED: Final = body(
    {"model": text(), "input": either(text(), array(_ITEM, MESSAGES_MAX))},
    **SAMPLING,
    **IDENTITY,
    stream=FLAG,
    stream_options=OBJECT,
    instructions=text(),
    previous_response_id=text(maxLength=MESSAGE_NAME_CHARS_MAX),
    store=FLAG,
    tools=array(body({"type": text()}, name=text(), parameters=OBJECT), TOOLS_MAX),
    tool_choice=CHOICE,
    parallel_tool_calls=FLAG,
    max_output_tokens=TOKENS,
    top_logprobs=integer(0, TOP_LOGPROBS_MAX),
    reasoning=body({}, effort=text(maxLength=MESSAGE_NAME_CHARS_MAX), summary=text()),
    include=array(text(), INCLUDED_MAX),
    text=body({}, format=_FORMAT, verbosity=text()),
    truncation=one_of("auto", "disabled"),
    chat_template_kwargs=OBJECT,
    background=FLAG,
    conversation=ANYTHING,
    prompt=ANYTHING,
    safety_identifier=ANYTHING,
    context_management=ANYTHING,
    max_tool_calls=ANYTHING,
    moderation=ANYTHING,
)
SCHEMAS: Final[dict[str, Schema]] = {
    "Response": answer(
        id=text(),
        object=one_of("response"),
        created_at=integer(None),
        status=one_of("in_progress", "completed", "incomplete", "failed"),
        model=text(),
        output=array(
            answer(
                id=text(), type=one_of("message", "reasoning", "function_call", "custom_tool_call")
            )
        ),
        error=nullable(answer(code=text(), message=text())),
        incomplete_details=nullable(answer(reason=text())),
        tools=array(OBJECT),
        usage=nullable(
            answer(
                input_tokens=integer(),
                input_tokens_details=answer(cached_tokens=integer()),
                output_tokens=integer(),
                output_tokens_details=answer(reasoning_tokens=integer()),
                total_tokens=integer(),
            )
        ),
    ),
}
_ID: Final = Parameter("response", "path", text(), "A stored response.")
_STREAM: Final = Parameter("stream", "query", text(), "Only `false`: what is stored has ended.")
DESCRIBED: Final = (
    described_turn(
        "/v1/responses",
        "openai",
        "A turn in OpenAI's newer dialect, streamed or whole.",
        whole=ref("Response"),
        body=_ASKED,
    ),
    Described(
        "GET",
        "/v1/responses/{response}",
        "openai",
        "A stored response.",
        {JSON: ref("Response")},
        NAMED,
        parameters=(_ID, _STREAM),
    ),
    Described(
        "DELETE",
        "/v1/responses/{response}",
        "openai",
        "Forgets it.",
        {JSON: answer(id=text(), object=one_of("response"), deleted={"const": True})},
        NAMED,
        parameters=(_ID,),
    ),
    Described(
        "GET",
        "/v1/responses/{response}/input_items",
        "openai",
        "What it was asked with.",
        {
            JSON: listing(
                answer(id=text(), type=text()),
                first_id=nullable(text()),
                last_id=nullable(text()),
                has_more=FLAG,
            )
        },
        NAMED,
        parameters=(_ID,),
    ),
)
