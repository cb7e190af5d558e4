"""Conversations with known right answers, for the bundled recall model."""

import random
from dataclasses import dataclass
from typing import Any

THINGS = ["vault", "garden", "harbor", "archive", "engine", "tower", "cellar", "bridge"]
ASPECTS = ["code", "color", "keeper", "number", "motto"]
VALUES = ["otter", "lantern", "quartz", "violin", "saddle", "copper", "meadow", "falcon", "ember"]
NAMES = ["Mira", "Jonas", "Aiko", "Zoé", "Ravi", "Elena", "Björn", "Chidi"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class Turn:
    """Messages to add, and words that the answer must contain."""

    messages: tuple[dict[str, Any], ...]
    expected: str


@dataclass(frozen=True)
class Transcript:
    """A conversation, turn by turn; the model's answers are inserted in between."""

    name: str
    opening: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    tools: list[Any] | None = None


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Build a chat message."""
    return {"role": role, "content": content, **more}


def document(seed: int, lines: int) -> tuple[str, dict[str, str]]:
    """Return lines of facts and, for each question, its answer."""
    rng = random.Random(seed)
    facts: dict[str, str] = {}
    while len(facts) < lines:
        question = f"The {rng.choice(THINGS)} {rng.choice(ASPECTS)} of {rng.choice(NAMES)}"
        question += f" {rng.randrange(100, 1000)} is"
        facts.setdefault(
            question, f"{rng.choice(VALUES)} {rng.choice(VALUES)} {rng.randrange(100)}."
        )
    return "\n".join(f"{q} {a}" for q, a in facts.items()) + "\n", facts


def asking(facts: dict[str, str], count: int, seed: int = 0) -> tuple[Turn, ...]:
    """Return turns that ask about some of the facts."""
    chosen = random.Random(seed).sample(sorted(facts), count)
    return tuple(Turn((message("user", q),), facts[q]) for q in chosen)


def short_notes() -> Transcript:
    """State facts one by one, and ask for them later."""
    facts = [
        ("The vault code of Mira is", "otter lantern quartz."),
        ("The harbor color of Jonas is", "deep green 42."),
        ("The tower motto of Aiko is", "falcon before ember."),
    ]
    turns = [Turn((message("user", f"{q} {a}"),), "") for q, a in facts]
    turns += [Turn((message("user", q),), a) for q, a in reversed(facts)]
    system = message("system", "You keep notes and repeat them word for word.")
    return Transcript("short notes", (system,), tuple(turns))


def tool_use() -> Transcript:
    """Return tool calls and their results in the forms of the OpenAI API."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"what": "engine keeper"}'},
    }
    looked_up = (
        message("user", "Who keeps the engine?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The engine keeper is Ravi Ember."},
        message("user", "The engine keeper is"),
    )
    turns = (
        Turn((message("user", "The archive number of Elena is 7-3391."),), ""),
        Turn(looked_up, "Ravi Ember."),
        Turn((message("user", "The archive number of Elena is"),), "7-3391."),
    )
    return Transcript("tool use", (message("system", "You use tools."),), turns, TOOLS)


def many_tongues() -> Transcript:
    """Return text outside ASCII: characters of several bytes, emoji."""
    facts = [
        ("Le code de Zoé est", "château-déjà-vu 東京 42."),
        ("Björns Garten heißt", "größer 🦊🌙 naïve."),
        ("東京の合言葉は", "さくら 七七."),
    ]
    turns = [Turn((message("user", f"{q} {a}"),), "") for q, a in facts]
    turns += [Turn((message("user", q),), a) for q, a in facts]
    return Transcript("many tongues", (), tuple(turns))


def long_document() -> Transcript:
    """Return a document of about six blocks, then questions about it."""
    text, facts = document(4, 80)
    opening = (message("system", "Answer from the document."), message("user", text))
    return Transcript("long document", opening, asking(facts, 3))


ALL = (short_notes, tool_use, many_tongues, long_document)
