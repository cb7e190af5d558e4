"""Generated traces of tool-using agents: steps, failed calls with retries, summaries.

The shapes are those of public coding agents: a system prompt, then loops of one call and one
result, long results, calls that fail and are repeated, and after some steps a user's message that
sums up or asks for more. The words come from Python's own documentation.
"""

import json
import pydoc_data.topics
import random
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.chat_client import Message

TOOLS: Final = ("read_file", "search", "run_tests", "edit_file", "list_folder")
FAILURE_CHANCE: Final = 0.15
SUMMARY_EVERY: Final = 10  # steps
RESULT_WORDS: Final = (12, 60)
THOUGHT_WORDS: Final = (5, 12)
_PATHS: Final = ("src/main.py", "src/cache.py", "tests/test_cache.py", "README.md", "setup.cfg")


@dataclass(frozen=True, slots=True)
class Step:
    """Prompt of one step: all messages before the model's next call."""

    number: int
    messages: tuple[Message, ...]


def schemas() -> list[dict[str, Any]]:
    """Return the tools in the form of requests."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in TOOLS
    ]


def trace(steps: int, seed: int) -> list[Step]:
    """Return the steps of one task; equal seeds give equal traces."""
    rng, words = random.Random(seed), _words()
    messages: list[Message] = [
        {"role": "system", "content": f"You are an agent that works on a program. Task {seed}."},
        {"role": "user", "content": f"Please find out about this: {_text(rng, words, (20, 40))}"},
    ]
    prompts: list[Step] = []
    failed: tuple[str, str] | None = None  # call to be repeated
    for number in range(steps):
        prompts.append(Step(number, tuple(messages)))
        name, path = failed or (rng.choice(TOOLS), rng.choice(_PATHS))
        fails = failed is None and rng.random() < FAILURE_CHANCE
        failed = (name, path) if fails else None
        thought = f"<think>{_text(rng, words, THOUGHT_WORDS)}</think>"
        messages.append(_call(f"call_{seed}_{number}", name, path, thought))
        result = "Error: the command ended with exit code 1" if fails else ""
        content = result or _text(rng, words, RESULT_WORDS)
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{seed}_{number}", "content": content}
        )
        if number % SUMMARY_EVERY == SUMMARY_EVERY - 1 and failed is None:
            messages.append({"role": "assistant", "content": _text(rng, words, RESULT_WORDS)})
            more = f"Go on with {_text(rng, words, THOUGHT_WORDS)}"
            messages.append({"role": "user", "content": more})
    return prompts


def _call(call_id: str, name: str, path: str, thought: str) -> Message:
    function = {"name": name, "arguments": json.dumps({"path": path})}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": thought, "tool_calls": calls}


def _words() -> list[str]:
    topics = pydoc_data.topics.topics
    return " ".join(topics[name] for name in sorted(topics)).split()


def _text(rng: random.Random, words: list[str], length: tuple[int, int]) -> str:
    """Return consecutive words of the documentation."""
    count = rng.randint(*length)
    start = rng.randrange(len(words) - count)
    return " ".join(words[start : start + count])
