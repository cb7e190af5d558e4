"""Microsoft Agent Framework: an author and a critic who read a document, and remember it."""

import asyncio
import os
import sys
from pathlib import Path

from agent_framework import Agent, FileHistoryProvider
from agent_framework.openai import OpenAIChatCompletionClient

URL, MODEL = os.environ.get("FABRIC", "http://127.0.0.1:8000"), os.environ.get("MODEL", "recall")
CREW, DOCUMENT, QUESTION = sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3]
FABRIC = {"base_url": f"{URL}/v1", "api_key": "any", "model": MODEL}


def member(name):
    me = {"X-Agent-ID": f"{CREW}.{name}"}  # its name in the crew is its memory's name
    model = OpenAIChatCompletionClient(**FABRIC, default_headers=me)
    talks = FileHistoryProvider("talks")  # what it sends again
    return Agent(model, f"{DOCUMENT}\nYou are the {name}.", name=name, context_providers=[talks])


async def ask(agent, text):
    session = agent.create_session(session_id=f"{CREW}.{agent.name}")
    answer = await agent.run(text, session=session)
    used = answer.usage_details
    tokens = f"{used['cache_read_input_token_count']} of {used['input_token_count']} tokens"
    print(f"{agent.name}: {answer.text} ({tokens} remembered)")
    return answer.text


async def main():
    answer = await ask(member("author"), QUESTION)
    await ask(member("critic"), f"The author says: {answer}\nIs that so? {QUESTION}")


asyncio.run(main())
