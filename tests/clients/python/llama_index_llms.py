"""LlamaIndex: its model of OpenAI-like endpoints, an agent, and structured answers."""

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def llm(model=MODEL):
    return OpenAILike(
        model=model,
        api_base=V1,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
    )


class City(BaseModel):
    """A city."""

    city: str
    people: int


def user(text):
    return [ChatMessage(role="user", content=text)]


def plain():
    return llm().chat(user(HELLO)).message.content


def streamed():
    return [part.delta or "" for part in llm().stream_chat(user(HELLO))]


async def tool():
    return str(await FunctionAgent(tools=[weather], llm=llm()).run(WEATHER))


def structured():
    return llm().structured_predict(City, PromptTemplate(CITY)).model_dump()


def structured_chat():
    return llm().as_structured_llm(City).chat(user(CITY)).raw.model_dump()


def error():
    return refused(lambda: llm("nope").chat(user(HELLO)), Exception)


def cancel():
    stream = llm().stream_chat(user(ENDLESS))
    next(stream)
    stream.close()


def warm():
    messages = user(LONG_PROMPT)
    messages += [llm().chat(messages).message, *user(AGAIN)]
    used = llm().chat(messages).raw.usage
    return [used.prompt_tokens, used.prompt_tokens_details.cached_tokens]


run(plain, streamed, tool, structured, structured_chat, error, cancel, warm)
