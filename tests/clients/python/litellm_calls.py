"""litellm: its providers for endpoints of OpenAI's and of Anthropic's dialect."""

import json

import litellm
from features import (
    AGAIN,
    CITY,
    ENDLESS,
    HELLO,
    KEY,
    LONG_PROMPT,
    MODEL,
    URL,
    V1,
    WEATHER,
    refused,
    run,
    weather,
)
from pydantic import BaseModel

PROVIDERS = ("openai", "hosted_vllm", "lm_studio")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA},
}


class City(BaseModel):
    city: str
    people: int


def complete(text, provider="openai", **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    base = URL if provider == "anthropic" else V1
    model = f"{provider}/{more.pop('model', MODEL)}"
    return litellm.completion(model=model, api_base=base, api_key=KEY, messages=messages, **more)


def text_of(response):
    return response.choices[0].message.content


def plain():
    return text_of(complete(HELLO))


def plain_providers():
    return [text_of(complete(HELLO, provider)) for provider in (*PROVIDERS, "anthropic")]


def streamed():
    return [part.choices[0].delta.content or "" for part in complete(HELLO, stream=True)]


def tool(provider="openai"):
    messages = [{"role": "user", "content": WEATHER}]
    message = complete(messages, provider, tools=[TOOL]).choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return text_of(complete(messages, provider, tools=[TOOL]))


def tool_anthropic():
    return tool("anthropic")


def tool_required():
    response = complete(HELLO, tools=[TOOL], tool_choice="required")
    return [call.function.name for call in response.choices[0].message.tool_calls]


def structured():
    return json.loads(text_of(complete(CITY, response_format=City)))


def error():
    return refused(lambda: complete(HELLO, model="nope"), litellm.NotFoundError)


def too_long():
    return refused(lambda: complete("geese " * 500_000), litellm.ContextWindowExceededError)


def cancel():
    stream = complete(ENDLESS, stream=True)
    next(iter(stream))
    stream.completion_stream.close()


def warm():
    messages = [{"role": "user", "content": LONG_PROMPT}]
    messages += [complete(messages).choices[0].message, {"role": "user", "content": AGAIN}]
    used = complete(messages).usage
    return [used.prompt_tokens, used.prompt_tokens_details.cached_tokens]


run(
    *(plain, plain_providers, streamed, tool, tool_anthropic, tool_required, structured, error),
    *(too_long, cancel, warm),
)
