"""LangChain and LangGraph: chat models of both dialects, agents with a memory."""

from features import AGAIN, CITY, ENDLESS, HELLO, KEY, MODEL, TOLD, URL, V1, WEATHER, refused, run
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
    return [made.text for made in model.batch([HELLO, HELLO])]


def tool():
    agent = create_agent(model, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_streamed():
    agent, said = create_agent(model, [weather]), []
    asked = {"messages": [HumanMessage(WEATHER)]}
    for part, about in agent.stream(asked, stream_mode="messages"):
        if about["langgraph_node"] == "model":
            said.append(part.text)
    return "".join(said)


def tool_responses():
    agent = create_agent(newer, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_anthropic():
    agent = create_agent(claude, [weather])
    return agent.invoke({"messages": [HumanMessage(WEATHER)]})["messages"][-1].text


def tool_required():
    made = model.bind_tools([weather], tool_choice="any").invoke(HELLO)
    return [call["name"] for call in made.tool_calls]


def structured():
    return model.with_structured_output(City).invoke(CITY).model_dump()


def structured_by_call():
    chosen = model.with_structured_output(City, method="function_calling")
    return chosen.invoke(CITY).model_dump()


def structured_anthropic():
    return claude.with_structured_output(City).invoke(CITY).model_dump()


def structured_agent():
    agent = create_agent(model, [weather], response_format=City)
    asked = {"messages": [HumanMessage(WEATHER)]}
    return agent.invoke(asked)["structured_response"].model_dump()


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
    agent.invoke({"messages": [HumanMessage(TOLD)]}, thread)
    made = agent.invoke({"messages": [HumanMessage(AGAIN)]}, thread)["messages"][-1]
    used = made.usage_metadata
    return [used["input_tokens"], used["input_token_details"]["cache_read"]]


run(
    *(plain, streamed, streamed_async, batch, tool, tool_streamed, tool_responses, tool_anthropic),
    *(tool_required, structured, structured_by_call, structured_anthropic, structured_agent),
    *(error, cancel, warm),
)
