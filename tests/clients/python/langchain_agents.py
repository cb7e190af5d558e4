"""LangChain and LangGraph: chat models of both dialects, agents with a memory."""

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
)
from features import weather as tell
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

model = ChatOpenAI(base_url=V1, api_key=KEY, model=MODEL)
newer = ChatOpenAI(base_url=V1, api_key=KEY, model=MODEL, use_responses_api=True)
claude = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL)
weather = as_tool(tell)


class City(BaseModel):
    """A city."""

    city: str = Field(description="its name")
    people: int


def plain():
    return model.invoke(HELLO).text


def streamed():
    return [part.text for part in model.stream(HELLO)]


async def streamed_async():
    return [part.text async for part in model.astream(HELLO)]


def batch():
    return [answer.text for answer in model.batch([HELLO, HELLO])]


def tool():
    agent = create_agent(model, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_streamed():
    agent, texts = create_agent(model, [weather]), []
    request = {"messages": [HumanMessage(WEATHER)]}
    for part, about in agent.stream(request, stream_mode="messages"):
        if about["langgraph_node"] == "model":
            texts.append(part.text)
    return "".join(texts)


def tool_responses():
    agent = create_agent(newer, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_anthropic():
    agent = create_agent(claude, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_required():
    answer = model.bind_tools([weather], tool_choice="any").invoke(HELLO)
    return [call["name"] for call in answer.tool_calls]


def structured():
    return model.with_structured_output(City).invoke(CITY).model_dump()


def structured_by_call():
    chosen = model.with_structured_output(City, method="function_calling")
    return chosen.invoke(CITY).model_dump()


def structured_anthropic():
    return claude.with_structured_output(City).invoke(CITY).model_dump()


def structured_agent():
    agent = create_agent(model, [weather], response_format=City)
    request = {"messages": [HumanMessage(WEATHER)]}
    return agent.invoke(request)["structured_response"].model_dump()


def error():
    return refused(
        lambda: ChatOpenAI(base_url=V1, api_key=KEY, model="nope").invoke(HELLO), Exception
    )


def cancel():
    stream = model.stream(ENDLESS)
    next(stream)
    stream.close()


def warm():
    agent = create_agent(model, [weather], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [HumanMessage(LONG_PROMPT)]}, thread)
    answer = agent.invoke({"messages": [HumanMessage(AGAIN)]}, thread)["messages"][-1]
    used = answer.usage_metadata
    return [used["input_tokens"], used["input_token_details"]["cache_read"]]


run(
    *(plain, streamed, streamed_async, batch, tool, tool_streamed, tool_responses, tool_anthropic),
    *(tool_required, structured, structured_by_call, structured_anthropic, structured_agent),
    *(error, cancel, warm),
)
