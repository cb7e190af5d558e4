"""CrewAI: an agent, its tools, and a task with structured output."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool as as_tool
from features import AGAIN, CITY, HELLO, KEY, LONG_PROMPT, MODEL, V1, WEATHER, refused, run
from features import weather as tell
from pydantic import BaseModel


class City(BaseModel):
    city: str
    people: int


def llm(model=MODEL, **more):
    return LLM(model=f"openai/{model}", base_url=V1, api_key=KEY, **more)


def crew(description, model=MODEL, **more):
    tools = more.pop("tools", [])
    teller = Agent(role="Teller", goal="Tell", backstory="Tells.", llm=llm(model), tools=tools)
    task = Task(description=description, expected_output="An answer.", agent=teller, **more)
    return Crew(agents=[teller], tasks=[task]).kickoff()


def plain():
    return llm().call(HELLO)


def plain_crew():
    return [crew(HELLO).raw, crew(HELLO).raw]


def tool():
    return crew(WEATHER, tools=[as_tool(tell)]).raw


def structured():
    return crew(CITY, output_pydantic=City).pydantic.model_dump()


def structured_call():
    response = llm(response_format=City).call(CITY)
    return (
        response.model_dump()
        if isinstance(response, City)
        else City.model_validate_json(response).model_dump()
    )


def error():
    return refused(lambda: llm("nope").call(HELLO), Exception)


def warm():
    messages = [{"role": "user", "content": LONG_PROMPT}]
    reply = llm().call(messages)
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
    llm().call(messages)


run(plain, plain_crew, tool, structured, structured_call, error, warm)
