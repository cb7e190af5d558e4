"""Microsoft's Agent Framework, AutoGen's successor: over Responses and over chats."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
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


class City(BaseModel):
    city: str
    people: int


def agent(kind=OpenAIChatCompletionClient, model=MODEL, **more):
    return Agent(kind(model=model, base_url=V1, api_key=KEY), "Be brief.", **more)


async def plain():
    return (await agent().run(HELLO)).text


async def plain_responses():
    return (await agent(OpenAIChatClient).run(HELLO)).text


async def streamed():
    return [part.text async for part in agent().run(HELLO, stream=True)]


async def tool():
    return (await agent(tools=[weather]).run(WEATHER)).text


async def tool_responses():
    return (await agent(OpenAIChatClient, tools=[weather]).run(WEATHER)).text


async def structured():
    return (await agent().run(CITY, options={"response_format": City})).value.model_dump()


async def error():
    return await refused_async(agent(model="nope").run(HELLO), Exception)


async def cancel():
    async for part in agent().run(ENDLESS, stream=True):
        if part.text:
            break


async def warm():
    own = agent()
    session = own.create_session()
    await own.run(LONG_PROMPT, session=session)
    await own.run(AGAIN, session=session)


run(plain, plain_responses, streamed, tool, tool_responses, structured, error, cancel, warm)
