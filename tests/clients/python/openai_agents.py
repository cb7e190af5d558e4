"""OpenAI's Agents SDK, over Responses (its default) and over chats."""

import agents
from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession
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
)
from features import weather as tell
from openai import AsyncOpenAI
from pydantic import BaseModel

client = AsyncOpenAI(base_url=V1, api_key=KEY)
agents.set_default_openai_client(client)
agents.set_tracing_disabled(True)
weather = agents.function_tool(tell)
chat = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


class City(BaseModel):
    city: str
    people: int


def agent(model=MODEL, **more):
    return Agent(name="teller", instructions="Be brief.", model=model, **more)


async def final_output(started):
    return (await started).final_output


async def plain():
    return await final_output(Runner.run(agent(), HELLO))


async def plain_chat():
    return await final_output(Runner.run(agent(chat), HELLO))


async def streamed():
    result, parts = Runner.run_streamed(agent(), HELLO), []
    async for event in result.stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", None) == "response.output_text.delta":
            parts.append(data.delta)
    return parts


async def tool():
    return await final_output(Runner.run(agent(tools=[weather]), WEATHER))


async def tool_chat():
    return await final_output(Runner.run(agent(chat, tools=[weather]), WEATHER))


async def tool_required():
    forced = agents.ModelSettings(tool_choice="required")
    result = await Runner.run(agent(tools=[weather], model_settings=forced), HELLO)
    return [item.raw_item.name for item in result.new_items if item.type == "tool_call_item"]


async def handoff():
    there = Agent(name="weather", handoff_description="Tells the weather.", model=MODEL)
    result = await Runner.run(agent(handoffs=[there]), "Please transfer me.")
    return result.last_agent.name


async def structured():
    return (await final_output(Runner.run(agent(output_type=City), CITY))).model_dump()


async def structured_chat():
    return (await final_output(Runner.run(agent(chat, output_type=City), CITY))).model_dump()


async def structured_with_tool():
    started = Runner.run(agent(output_type=City, tools=[weather]), WEATHER)
    return (await final_output(started)).model_dump()


async def error():
    return await refused_async(Runner.run(agent("nope"), HELLO), Exception)


async def cancel():
    result = Runner.run_streamed(agent(), ENDLESS)
    async for event in result.stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", None) == "response.output_text.delta":
            result.cancel()


async def warm():
    session = SQLiteSession("one")
    await Runner.run(agent(), LONG_PROMPT, session=session)
    result = await Runner.run(agent(), AGAIN, session=session)
    used = result.context_wrapper.usage
    return [used.input_tokens, used.input_tokens_details.cached_tokens]


run(
    *(plain, plain_chat, streamed, tool, tool_chat, tool_required, handoff, structured),
    *(structured_chat, structured_with_tool, error, cancel, warm),
)
