"""OpenAPI descriptions of OpenAI's Responses API."""

from typing import Final

from router.api.openapi import (
    EDIT_ANSWER_HEADERS,
    EDIT_HEADERS,
    FLAG,
    JSON,
    NAMED,
    OBJECT,
    WRITES,
    Described,
    Parameter,
    answer,
    array,
    described_turn,
    integer,
    listing,
    one_of,
    ref,
    text,
    with_macfabric_field,
)
from router.http.schema import Schema, nullable
from router.http.turn_headers import IGNORED_HEADER
from router.openai.responses.request import RESPONSES_BODY

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
_STREAM: Final = Parameter(
    "stream", "query", text(), "Only `false`: a stored response is complete."
)
DESCRIBED: Final = (
    described_turn(
        "/v1/responses",
        "openai",
        "A turn in OpenAI's newer dialect, streamed or whole.",
        whole=ref("Response"),
        body=RESPONSES_BODY.schema(),
    ),
    Described(
        "POST",
        "/v1/responses/input_tokens",
        "openai",
        "Counts the tokens of such a turn by the model's own tokenizer.",
        {JSON: answer(object=one_of("response.input_tokens"), input_tokens=integer())},
        WRITES,
        body=with_macfabric_field(RESPONSES_BODY.schema()),
        parameters=EDIT_HEADERS,
        rare_headers={**EDIT_ANSWER_HEADERS, IGNORED_HEADER: text()},
    ),
    Described(
        "POST",
        "/v1/responses/compact",
        "openai",
        "Not supported: always 404.",
        {JSON: ref("Error")},
        NAMED,
        statuses=(404,),
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
        "Deletes a stored response.",
        {JSON: answer(id=text(), object=one_of("response"), deleted={"const": True})},
        NAMED,
        parameters=(_ID,),
    ),
    Described(
        "GET",
        "/v1/responses/{response}/input_items",
        "openai",
        "The input of a stored response.",
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
