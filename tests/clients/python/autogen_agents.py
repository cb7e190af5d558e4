"""AutoGen: its client of OpenAI's dialect, an assistant with a tool, and a team."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
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
    refused_async,
    run,
    weather,
)
from pydantic import BaseModel

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}


class City(BaseModel):
    city: str
    people: int


def client(model=MODEL):
    return OpenAIChatCompletionClient(model=model, base_url=V1, api_key=KEY, model_info=INFO)


def user(text):
    return [UserMessage(content=text, source="user")]


async def plain():
    return (await client().create(user(HELLO))).content


async def streamed():
    parts = [part async for part in client().create_stream(user(HELLO))]
    text = "".join(part for part in parts if isinstance(part, str))
    return [text.partition("</think>")[2]]  # it shows thoughts in line


async def tool():
    agent = AssistantAgent(
        "teller", client(), tools=[weather], reflect_on_tool_use=True, model_client_stream=True
    )
    return (await agent.run(task=WEATHER)).messages[-1].content


async def structured():
    agent = AssistantAgent("teller", client(), output_content_type=City)
    return (await agent.run(task=CITY)).messages[-1].content.model_dump()


async def structured_json():
    response = await client().create(user(CITY), json_output=City)
    return City.model_validate_json(response.content).model_dump()


async def error():
    return await refused_async(client("nope").create(user(HELLO)), Exception)


async def cancel():
    token = CancellationToken()
    stream = client().create_stream(user(ENDLESS), cancellation_token=token)
    async for _ in stream:
        break
    token.cancel()
    await stream.aclose()


async def warm():
    own, messages = client(), user(LONG_PROMPT)
    first = await own.create(messages)
    messages += [AssistantMessage(content=first.content, source="teller"), *user(AGAIN)]
    await own.create(messages)


run(plain, streamed, tool, structured, structured_json, error, cancel, warm)
