"""CrewAI: an author and a critic who read a document, and remember what they said of it."""

import os
import sys
from pathlib import Path

from crewai import LLM, Agent, Crew, Task

URL, MODEL = os.environ.get("FABRIC", "http://127.0.0.1:8000"), os.environ.get("MODEL", "recall")
CREW, DOCUMENT, QUESTION = sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3]
FABRIC = {"base_url": f"{URL}/v1", "api_key": "any", "model": f"openai/{MODEL}"}
TALKS = Path(f"{CREW}.txt")  # what each of them is sent again: it only grows
TALKS.touch()


def member(name, goal):
    me = {"X-Agent-ID": f"{CREW}.{name}"}  # its name in the crew is its memory's name
    return Agent(role=name, goal=goal, backstory=DOCUMENT, llm=LLM(**FABRIC, default_headers=me))


def task(agent, text):
    return Task(description=TALKS.read_text() + text, expected_output="A line.", agent=agent)


author, critic = member("author", "to answer"), member("critic", "to find faults")
tasks = [task(author, QUESTION), task(critic, f"Is the author right? {QUESTION}")]
answers = Crew(agents=[author, critic], tasks=tasks).kickoff().tasks_output
with TALKS.open("a") as talks:
    print(QUESTION, *(f"{made.agent}: {made.raw}" for made in answers), sep="\n", file=talks)
for agent, made in zip((author, critic), answers, strict=True):
    used = agent.llm.get_token_usage_summary()
    tokens = f"{used.cached_prompt_tokens} of {used.prompt_tokens} tokens"
    print(f"{agent.role}: {made.raw} ({tokens} remembered)")
