"""OpenAI's SDK as its own documentation shows it: chats, and Responses."""

import json
from typing import Literal

import openai
from features import (
    AGAIN,
    CITY,
    ENDLESS,
    HELLO,
    KEY,
    LONG_PROMPT,
    MODEL,
    V1,
    WEATHER,
    refused,
    run,
    weather,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=V1, api_key=KEY)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


class Weather(BaseModel):
    """Tell the weather."""

    city: str


class City(BaseModel):
    city: str
    size: Literal["small", "large"]
    people: int


def user(text):
    return [{"role": "user", "content": text}]


def plain():
    response = client.chat.completions.create(model=MODEL, messages=user(HELLO))
    return response.choices[0].message.content


def streamed():
    parts = client.chat.completions.create(model=MODEL, messages=user(HELLO), stream=True)
    return [part.choices[0].delta.content or "" for part in parts if part.choices]


def tool(**more):
    messages = user(WEATHER)
    options = {"model": MODEL, "tools": [TOOL]}
    first = client.chat.completions.create(messages=messages, **options, **more).choices[0].message
    messages.append(first)
    for call in first.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return client.chat.completions.create(messages=messages, **options).choices[0].message.content


def tool_streamed():
    with client.chat.completions.stream(
        model=MODEL, messages=user(WEATHER), tools=[openai.pydantic_function_tool(Weather)]
    ) as stream:
        done = stream.get_final_completion().choices[0]
    return done.message.tool_calls[0].function.parsed_arguments.model_dump()


def tool_required():
    return tool(tool_choice="required")


def tool_named():
    return tool(tool_choice={"type": "function", "function": {"name": "weather"}})


def structured():
    response = client.chat.completions.parse(model=MODEL, messages=user(CITY), response_format=City)
    return response.choices[0].message.parsed.model_dump()


def structured_with_tool():
    messages = user(WEATHER)
    options = {"model": MODEL, "tools": [openai.pydantic_function_tool(Weather)]}
    first = client.chat.completions.parse(messages=messages, response_format=City, **options)
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        result = weather(**call.function.parsed_arguments.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = client.chat.completions.parse(messages=messages, response_format=City, **options)
    return second.choices[0].message.parsed.model_dump()


def json_object():
    response = client.chat.completions.create(
        model=MODEL, messages=user(CITY), response_format={"type": "json_object"}
    )
    return json.loads(response.choices[0].message.content)


def error():
    return refused(
        lambda: client.chat.completions.create(model="nope", messages=user(HELLO)),
        openai.NotFoundError,
    )


def too_long():
    return refused(
        lambda: client.chat.completions.create(model=MODEL, messages=user("geese " * 500_000)),
        openai.BadRequestError,
    )


def cancel():
    with client.chat.completions.create(model=MODEL, messages=user(ENDLESS), stream=True) as parts:
        for _ in parts:
            break


def warm():
    messages = user(LONG_PROMPT)
    first = client.chat.completions.create(model=MODEL, messages=messages)
    messages += [first.choices[0].message, *user(AGAIN)]
    return usage(client.chat.completions.create(model=MODEL, messages=messages).usage)


def usage(used):
    return [used.prompt_tokens, used.prompt_tokens_details.cached_tokens]


def several():
    response = client.chat.completions.create(model=MODEL, messages=user(HELLO), n=2)
    return [choice.message.content for choice in response.choices]


def choices():
    response = client.completions.create(
        model=MODEL, prompt=HELLO, n=3, max_tokens=6, temperature=0
    )
    return [choice.text for choice in response.choices]


def echo():
    response = client.completions.create(model=MODEL, prompt=HELLO, echo=True, max_tokens=6)
    return response.choices[0].text


def prompts():
    response = client.completions.create(
        model=MODEL, prompt=[HELLO, "Go."], echo=True, max_tokens=6
    )
    return [choice.text for choice in response.choices]


def continued():
    partial = "Hello from"
    response = client.chat.completions.create(
        model=MODEL,
        messages=[*user(HELLO), {"role": "assistant", "content": partial}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    return partial + response.choices[0].message.content


def responses():
    return client.responses.create(model=MODEL, input=HELLO).output_text


def responses_streamed():
    events = client.responses.create(model=MODEL, input=HELLO, stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def responses_tool():
    options = {"model": MODEL, "tools": [{"type": "function", "strict": True, **FUNCTION}]}
    first = client.responses.create(input=WEATHER, **options)
    results = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": weather(**json.loads(item.arguments)),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(input=results, previous_response_id=first.id, **options)
    return second.output_text


def responses_structured():
    response = client.responses.parse(model=MODEL, input=CITY, text_format=City)
    return response.output_parsed.model_dump()


def responses_warm():
    first = client.responses.create(model=MODEL, input=LONG_PROMPT)
    second = client.responses.create(model=MODEL, input=AGAIN, previous_response_id=first.id)
    return [second.usage.input_tokens, second.usage.input_tokens_details.cached_tokens]


async def concurrent():
    import asyncio

    own = openai.AsyncOpenAI(base_url=V1, api_key=KEY)
    requests = [
        own.chat.completions.create(model=MODEL, messages=user(f"{HELLO} {number}"))
        for number in range(8)
    ]
    return [response.choices[0].message.content for response in await asyncio.gather(*requests)]


def models():
    return [model.id for model in client.models.list()]


run(
    *(plain, streamed, tool, tool_streamed, tool_required, tool_named, structured, json_object),
    structured_with_tool,
    *(choices, echo, prompts, continued),
    *(error, too_long, cancel, warm, several, responses, responses_streamed, responses_tool),
    *(responses_structured, responses_warm, concurrent, models),
)
