"""Anthropic's SDK as its own documentation shows it."""

import anthropic
from anthropic import beta_tool
from features import (
    AGAIN,
    CITY,
    ENDLESS,
    HELLO,
    KEY,
    LONG_PROMPT,
    MODEL,
    URL,
    WEATHER,
    refused,
    run,
    weather,
)
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
TOOL = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


class City(BaseModel):
    city: str
    people: int


def request_for(text, **more):
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 2_000, "messages": messages, **more}


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def plain():
    return text_of(client.messages.create(**request_for(HELLO)))


def streamed():
    with client.messages.stream(**request_for(HELLO)) as stream:
        return list(stream.text_stream)


def thinking():
    thinks = {"type": "enabled", "budget_tokens": 1_024}
    response = client.messages.create(**request_for(HELLO, thinking=thinks))
    return [block.type for block in response.content]


def tool(**more):
    request = request_for(WEATHER, tools=[TOOL])
    first = client.messages.create(**request, **more)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
        for block in first.content
        if block.type == "tool_use"
    ]
    request["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    return text_of(client.messages.create(**request))


def tool_runner():
    runner = client.beta.messages.tool_runner(**request_for(WEATHER, tools=[beta_tool(weather)]))
    return text_of(runner.until_done())


def tool_required():
    return tool(tool_choice={"type": "any"})


def tool_named():
    return tool(tool_choice={"type": "tool", "name": "weather"})


def structured():
    return client.messages.parse(**request_for(CITY, output_format=City)).parsed_output.model_dump()


def error():
    return refused(
        lambda: client.messages.create(**{**request_for(HELLO), "model": "nope"}),
        anthropic.NotFoundError,
    )


def too_long():
    return refused(
        lambda: client.messages.create(**request_for("geese " * 500_000)), anthropic.BadRequestError
    )


def cancel():
    with client.messages.stream(**{**request_for(ENDLESS), "max_tokens": 60_000}) as stream:
        for _ in stream.text_stream:
            break


def warm():
    request = request_for(LONG_PROMPT)
    first = client.messages.create(**request)
    request["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": AGAIN},
    ]
    used = client.messages.create(**request).usage
    return [used.cache_read_input_tokens + used.input_tokens, used.cache_read_input_tokens]


def count():
    return client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": LONG_PROMPT}]
    ).input_tokens


def models():
    return [model.id for model in client.models.list()]


run(
    *(plain, streamed, thinking, tool, tool_runner, tool_required, tool_named, structured, error),
    *(too_long, cancel, warm, count, models),
)
