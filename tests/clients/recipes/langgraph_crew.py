"""LangGraph: an author and a critic who read a document, and remember what they said of it."""

import os
import sys
from pathlib import Path
from typing import Annotated, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph, add_messages

URL, MODEL = os.environ.get("FABRIC", "http://127.0.0.1:8000"), os.environ.get("MODEL", "recall")
CREW, DOCUMENT, QUESTION = sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3]


class Talks(TypedDict):
    question: str
    author: Annotated[list, add_messages]
    critic: Annotated[list, add_messages]


def member(name, hears):
    me = {"X-Agent-ID": f"{CREW}.{name}"}  # its name in the crew is its memory's name
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key="any", model=MODEL, default_headers=me)

    def speak(talks):
        system = SystemMessage(f"{DOCUMENT}\nYou are the {name}.")
        heard = HumanMessage(hears(talks))
        return {name: [heard, model.invoke([system, *talks[name], heard])]}

    return name, speak


def reviewed(talks):
    return f"The author says: {talks['author'][-1].text}\nIs that so? {talks['question']}"


graph = StateGraph(Talks)
graph.add_sequence([member("author", lambda t: t["question"]), member("critic", reviewed)])
graph.add_edge(START, "author")
with SqliteSaver.from_conn_string("talks.sqlite") as talks:  # what each of them sends again
    crew = graph.compile(checkpointer=talks)
    made = crew.invoke({"question": QUESTION}, {"configurable": {"thread_id": CREW}})
for name in ("author", "critic"):
    answer, used = made[name][-1].text, made[name][-1].usage_metadata
    cached = used["input_token_details"]["cache_read"]
    print(f"{name}: {answer} ({cached} of {used['input_tokens']} tokens remembered)")
