"""Agents of the demo and their facts, made from a seed: the same on every machine.

The recall model repeats what followed earlier: it answers "The vault code of Mira is" with the
words that followed these. Each fact occurs once, somewhere in a long first message.
"""

import random
from dataclasses import dataclass

MODEL = "recall"
SEED = 2_026
NAMES = ("Mira", "Otto", "Lena", "Omar")
# One subject per state of the demo, so that no answer can be copied from an earlier one.
SUBJECTS = ("vault code", "door number", "ship name", "server password", "ticket price")
VALUE_WORDS = 4
NOTES_COUNT = 67  # about 2,000 tokens
_VALUE_LIST = """
    otter lantern quartz violin amber falcon copper meadow silver maple thunder velvet orchid
    granite saffron willow comet anchor marble cedar pepper indigo walnut glacier ember juniper
    cobalt heron basalt clover linen raven topaz barley cinder dahlia fjord ginger hazel ivory
"""
_THING_LIST = """
    garden station letter train bridge river market kitchen engine office library museum harbour
    tower camera printer router cluster memory model project meeting report contract
"""
VALUES = tuple(_VALUE_LIST.split())
THINGS = tuple(_THING_LIST.split())
OPENINGS = (
    "This morning the {0} was closed because of the {1}, and a new {2}",
    "Every week the people at the {0} must look after the {1} while another {2}",
    "When the {0} is full, the old {1} will be moved, and the small {2}",
    "Nobody knows why the {0} has a second {1}, but the long {2}",
)
CLOSINGS = (
    "can be seen from the {0} as soon as the wind stops.",
    "starts at the {0} before the last {1} of the day.",
    "needs some time and a good {0} for the {1}.",
    "was brought to the {0} in the evening with the {1}.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact, and the question that asks for it."""

    statement: str
    question: str
    value: str


@dataclass(frozen=True, slots=True)
class DemoAgent:
    """One agent: a long briefing that contains its facts."""

    name: str
    briefing: str
    facts: tuple[Fact, ...]


def make_agents() -> list[DemoAgent]:
    """Write the briefings of all agents."""
    rng = random.Random(SEED)  # noqa: S311 - a story, not a secret
    return [_agent(name, rng) for name in NAMES]


def _agent(name: str, rng: random.Random) -> DemoAgent:
    facts = tuple(_fact(name, subject, rng) for subject in SUBJECTS)
    lines = [_note(rng) for _ in range(NOTES_COUNT)]
    for fact in facts:
        lines.insert(rng.randrange(len(lines)), fact.statement)
    return DemoAgent(name.lower(), " ".join(lines), facts)


def _fact(owner: str, subject: str, rng: random.Random) -> Fact:
    value = " ".join(rng.sample(VALUES, VALUE_WORDS))
    question = f"The {subject} of {owner} is"
    return Fact(f"{question} {value}.", question, value)


def _note(rng: random.Random) -> str:
    things = rng.sample(THINGS, 5)
    opening = rng.choice(OPENINGS).format(*things[:3])
    return f"{opening} {rng.choice(CLOSINGS).format(*things[3:])}"
