"""smolagents: its model of OpenAI's dialect, and agents that call tools or write code."""

from features import AGAIN, ENDLESS, HELLO, KEY, LONG_PROMPT, MODEL, V1, WEATHER, refused, run
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY)


class Weather(Tool):
    name = "weather"
    description = "Tell the weather in a city."
    inputs = {"city": {"type": "string", "description": "which"}}  # noqa: RUF012 - its users' way
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


def user(text):
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def plain():
    return model.generate(user(HELLO)).content


def streamed():
    return [part.content or "" for part in model.generate_stream(user(HELLO))]


def tool():
    return ToolCallingAgent(tools=[Weather()], model=model, max_steps=4).run(WEATHER)


def error():
    other = OpenAIServerModel(model_id="nope", api_base=V1, api_key=KEY)
    return refused(lambda: other.generate(user(HELLO)), Exception)


def cancel():
    stream = model.generate_stream(user(ENDLESS))
    next(stream)
    stream.close()


def warm():
    agent = ToolCallingAgent(tools=[Weather()], model=model, max_steps=4)
    agent.run(LONG_PROMPT)
    agent.run(AGAIN, reset=False)


run(plain, streamed, tool, error, cancel, warm)
