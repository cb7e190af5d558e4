"""Pydantic AI: agents over chats, Responses and Anthropic's dialect; output in all its ways."""

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
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
newer = OpenAIResponsesModel(MODEL, provider=provider)
claude = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))


class City(BaseModel):
    city: str
    people: int


def plain():
    return Agent(chat).run_sync(HELLO).output


async def streamed():
    async with Agent(chat).run_stream(HELLO) as result:
        return [part async for part in result.stream_text(delta=True)]


def tool():
    return Agent(chat, tools=[weather]).run_sync(WEATHER).output


def tool_responses():
    return Agent(newer, tools=[weather]).run_sync(WEATHER).output


def tool_anthropic():
    return Agent(claude, tools=[weather]).run_sync(WEATHER).output


def structured():
    return Agent(chat, output_type=City).run_sync(CITY).output.model_dump()


def structured_by_tool():
    return Agent(chat, output_type=ToolOutput(City)).run_sync(CITY).output.model_dump()


def structured_native():
    return Agent(chat, output_type=NativeOutput(City)).run_sync(CITY).output.model_dump()


def structured_prompted():
    return Agent(chat, output_type=PromptedOutput(City)).run_sync(CITY).output.model_dump()


def structured_native_with_tool():
    agent = Agent(chat, output_type=NativeOutput(City), tools=[weather])
    return agent.run_sync(WEATHER).output.model_dump()


def error():
    return refused(
        lambda: Agent(OpenAIChatModel("nope", provider=provider)).run_sync(HELLO), Exception
    )


async def cancel():
    async with Agent(chat).run_stream(ENDLESS) as result:
        async for _ in result.stream_text(delta=True):
            break


def warm():
    agent = Agent(chat)
    first = agent.run_sync(LONG_PROMPT)
    second = agent.run_sync(AGAIN, message_history=first.all_messages())
    used = second.usage() if callable(second.usage) else second.usage
    return [used.input_tokens, used.cache_read_tokens]


run(
    *(plain, streamed, tool, tool_responses, tool_anthropic, structured, structured_by_tool),
    *(structured_native, structured_prompted, structured_native_with_tool, error, cancel, warm),
)
