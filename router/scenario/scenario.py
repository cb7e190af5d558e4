"""What a scenario declares. These fields are the table that reader and JSON schema are made of."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fabric.edit_mode import EditMode
from fabric.limits import COMPLETION_TOKENS_MAX
from router.limits import (
    NAME_CHARS_TOLD,
    SCENARIO_AGENTS_MAX,
    SCENARIO_ITEMS_MAX,
    SCENARIO_KEY_CHARS_MAX,
    SCENARIO_NAME_CHARS_MAX,
    SCENARIO_PHASES_MAX,
    SCENARIO_ROUNDS_MAX,
    SCENARIO_TOOLS_MAX,
    SCENARIO_VARIABLES_MAX,
)
from router.scenario.kinds import (
    Anything,
    Fraction,
    Items,
    Named,
    OneOrItems,
    OrNothing,
    PlainText,
    Record,
    Whole,
    Word,
    Wording,
    given,
)
from router.scenario.template import TextTemplate

# Line ends of every kind, controls, and what is invisible or turns the direction of reading.
_UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0"
)
_NAME = PlainText(
    SCENARIO_NAME_CHARS_MAX,
    re.compile(r"[a-z0-9][a-z0-9-]*"),
    "lower-case letters, digits and hyphens",
)
_KEY = PlainText(
    SCENARIO_KEY_CHARS_MAX,
    re.compile(r"[a-z0-9][a-z0-9_-]*"),
    "lower-case letters, digits, _ and -, beginning with a letter or digit",
)
_TOOL = PlainText(
    SCENARIO_KEY_CHARS_MAX, re.compile(r"[a-zA-Z0-9_-]+"), "letters, digits, _ and - only"
)
_LINE = PlainText(
    NAME_CHARS_TOLD, re.compile(rf"[^{_UNSEEN}]*"), "one line without invisible characters"
)
_SHOWN = PlainText(
    SCENARIO_NAME_CHARS_MAX,
    re.compile(rf"[^\s:\[\]{_UNSEEN}](?:[^:\[\]{_UNSEEN}]*[^\s:\[\]{_UNSEEN}])?"),
    "one line without colons, brackets and invisible characters, as it stands before speech",
)
_KEYS = Items(_KEY, SCENARIO_AGENTS_MAX)
_SPOKEN = OneOrItems(Wording(), Items(Wording(), SCENARIO_ITEMS_MAX, 1, is_unique=False))


class Lifetime(StrEnum):
    """Lifetime of an agent's memory."""

    PERMANENT = "permanent"  # its id is the same in every run
    EPHEMERAL = "ephemeral"  # it is an agent of one run only


class TurnOrder(StrEnum):
    """When the agents of a phase hear each other."""

    IN_TURN = "in_turn"  # each hears who spoke before
    PARALLEL = "parallel"  # all of a round speak at once, and hear each other behind it


class KeptEdits(StrEnum):
    """Treatment of memory after an edit, as in requests."""

    EXACT = "exact"
    AMORTIZE = "amortize"


_TOKENS = Whole(1, COMPLETION_TOKENS_MAX)
_TEMPERATURE = Fraction(0.0, 2.0)
_ABOUT_TOKENS = "tokens that one answer may have"
_ABOUT_TEMPERATURE = "0 for the same answers each time"
_ABOUT_EDITS = "what becomes of memory behind an edit: computed again (exact) or kept"


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options of turns; None leaves an option to the fabric."""

    max_tokens: int | None = given(_TOKENS, _ABOUT_TOKENS, default=None)
    temperature: float | None = given(_TEMPERATURE, _ABOUT_TEMPERATURE, default=None)
    edits: KeptEdits | None = given(Word(KeptEdits), _ABOUT_EDITS, default=None)


@dataclass(frozen=True, slots=True)
class PlaceHint:
    """Placement hint of an agent; one that cannot be met is no error."""

    node: str | None = given(_KEY, "the node that it begins on", default=None)
    apart_from: tuple[str, ...] | None = given(
        _KEYS, "agents on whose nodes it is not to begin", default=None
    )
    together_with: tuple[str, ...] | None = given(
        _KEYS, "agents on whose node it is to begin", default=None, called="with"
    )


@dataclass(frozen=True, slots=True)
class Role:
    """One agent, as the scenario declares it."""

    name: str | None = given(_SHOWN, "what others hear it called; its key by default", default=None)
    lifetime: Lifetime = given(
        Word(Lifetime),
        "permanent: its memory outlives runs; ephemeral: of one run",
        default=Lifetime.PERMANENT,
    )
    system: TextTemplate | None = given(
        Wording(), "its system prompt; ${variable} is filled in", default=None
    )
    place: PlaceHint | None = given(
        Record(PlaceHint, ("node", "apart_from", "with")), "where it begins to live", default=None
    )
    tools: tuple[str, ...] = given(
        Items(_TOOL, SCENARIO_TOOLS_MAX), "those below `tools` that it may call", default=()
    )
    max_tokens: int | None = given(_TOKENS, _ABOUT_TOKENS, default=None)
    temperature: float | None = given(_TEMPERATURE, _ABOUT_TEMPERATURE, default=None)
    edits: KeptEdits | None = given(Word(KeptEdits), _ABOUT_EDITS, default=None)


@dataclass(frozen=True, slots=True)
class CannedAnswer:
    """A tool's answer to certain arguments."""

    text: TextTemplate = given(Wording(), "the answer, as it is")
    when: Mapping[str, Any] | None = given(
        Anything(), "arguments that the call has, among others; any by default", default=None
    )


@dataclass(frozen=True, slots=True)
class ToolStub:
    """A tool that agents may call; nothing is executed, answers are looked up."""

    description: str = given(PlainText(), "what agents are told of it")
    parameters: Mapping[str, Any] = given(
        Anything(), "a JSON schema of its arguments, as OpenAI's API has it"
    )
    answers: tuple[CannedAnswer, ...] = given(
        Items(Record(CannedAnswer), SCENARIO_ITEMS_MAX, 1, is_unique=False),
        "the first whose `when` is a part of the arguments",
    )


@dataclass(frozen=True, slots=True)
class Fanout:
    """Agents that begin with the memory of another one."""

    source: str = given(_KEY, "the agent whose memory they get", called="from")
    copies: tuple[str, ...] = given(
        Items(_KEY, SCENARIO_AGENTS_MAX, 1), "the agents that get it", called="as"
    )


@dataclass(frozen=True, slots=True)
class MemoryEdit:
    """Edit of one agent's history, from a phase on."""

    agent: str = given(_KEY, "whose memory is edited")
    clear_results_of: str | None = given(
        _TOOL, "the tool whose results so far are replaced by [cleared]", default=None
    )
    forget: str | None = given(_KEY, "the phase whose messages are left out", default=None)
    mode: EditMode = given(
        Word(EditMode),
        "forget: what lies behind is computed again; amortize: it is kept",
        default=EditMode.FORGET,
    )


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that is to hold behind a phase."""

    agent: str | None = given(_KEY, "whom it is about", default=None)
    says: TextTemplate | tuple[TextTemplate, ...] | None = given(
        _SPOKEN, "words, one of which it says in this phase", default=None
    )
    never_says: TextTemplate | tuple[TextTemplate, ...] | None = given(
        _SPOKEN, "words that it says in no turn of this phase", default=None
    )
    hears: TextTemplate | tuple[TextTemplate, ...] | None = given(
        _SPOKEN, "words, one of which it was told by then", default=None
    )
    never_hears: TextTemplate | tuple[TextTemplate, ...] | None = given(
        _SPOKEN, "words that it was never told", default=None
    )
    calls: str | None = given(_TOOL, "the tool that it calls in this phase", default=None)
    cached_share_min: float | None = given(
        Fraction(0.0, 1.0), "share of this phase's prompts that was cached", default=None
    )


CHECKS = ("says", "never_says", "hears", "never_hears", "calls", "cached_share_min")
Asked = TextTemplate | tuple[TextTemplate | None, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Agents that speak with each other for some rounds."""

    id: str = given(_KEY, "what other phases call it")
    agents: tuple[str, ...] = given(
        Items(_KEY, SCENARIO_AGENTS_MAX, 1), "who speaks, in this order"
    )
    title: str | None = given(_LINE, "the line that begins it; its id by default", default=None)
    rounds: int = given(Whole(1, SCENARIO_ROUNDS_MAX), "how often each speaks", default=1)
    order: TurnOrder = given(
        Word(TurnOrder),
        "in_turn: each hears who spoke before; parallel: all of a round speak at once",
        default=TurnOrder.IN_TURN,
    )
    visible_to: tuple[str, ...] | None = given(
        _KEYS, "who hears what is said; by default its agents; [] for nobody", default=None
    )
    after: tuple[str, ...] | None = given(
        Items(_KEY, SCENARIO_PHASES_MAX),
        "phases that must have ended; by default all before it",
        default=None,
    )
    opening: TextTemplate | None = given(
        Wording(), "told to all who hear the phase, as it begins", default=None
    )
    prompts: Mapping[str, TextTemplate] = given(
        Named(Wording(), SCENARIO_AGENTS_MAX, _KEY),
        "told to one agent only, as it begins",
        default={},
    )
    ask: Mapping[str, Asked] = given(
        Named(
            OneOrItems(
                Wording(),
                Items(OrNothing(Wording()), SCENARIO_ROUNDS_MAX, 1, is_unique=False),
            ),
            SCENARIO_AGENTS_MAX,
            _KEY,
        ),
        "told to one agent before each of its turns; a list has one text for each round, "
        "and null where it does not speak",
        default={},
    )
    fork: Fanout | None = given(
        Record(Fanout), "agents that begin with the memory of another one", default=None
    )
    directives: tuple[MemoryEdit, ...] = given(
        Items(
            Record(MemoryEdit, ("clear_results_of", "forget")),
            SCENARIO_ITEMS_MAX,
            is_unique=False,
        ),
        "memory that is edited before it begins",
        default=(),
    )
    expect: tuple[Expectation, ...] = given(
        Items(Record(Expectation, CHECKS), SCENARIO_ITEMS_MAX, is_unique=False),
        "what is to hold behind it",
        default=(),
    )

    @property
    def hearers(self) -> frozenset[str]:
        """All who hear anything of it."""
        return frozenset(self.agents) | frozenset(self.visible_to or ())

    @property
    def listeners(self) -> frozenset[str]:
        """All who hear what another agent says in it."""
        agents = {*self.agents, *(self.visible_to or ())}
        others = ((agent, speaker) for agent in agents for speaker in self.agents)
        return frozenset(a for a, s in others if a != s and self.hears(a, s))

    def hears(self, listener: str, speaker: str) -> bool:
        """Say whether an agent hears what another one says here."""
        heard_by = self.agents if self.visible_to is None else self.visible_to
        return listener == speaker or listener in heard_by

    def asked(self, agent: str, number: int) -> TextTemplate | None:
        """Return what an agent is told before its turn of a round; rounds count from 1."""
        asked = self.ask.get(agent)
        return asked[number - 1] if isinstance(asked, tuple) else asked

    def speakers(self, number: int) -> Iterator[str]:
        """Name who speaks in a round, in order."""
        for agent in self.agents:
            listed = isinstance(self.ask.get(agent), tuple)
            if not listed or self.asked(agent, number) is not None:
                yield agent

    @property
    def turns(self) -> Iterator[tuple[int, str]]:
        """All rounds with their speakers, in order."""
        for number in range(1, self.rounds + 1):
            for agent in self.speakers(number):
                yield number, agent


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole file."""

    name: str = given(_NAME, "its name, a part of its agents' ids", called="scenario")
    agents: Mapping[str, Role] = given(
        Named(Record(Role), SCENARIO_AGENTS_MAX, _KEY, 1), "who takes part"
    )
    phases: tuple[Phase, ...] = given(
        Items(Record(Phase), SCENARIO_PHASES_MAX, 1, is_unique=False), "what happens, in order"
    )
    title: str | None = given(_LINE, "what people read in lists", default=None)
    variables: Mapping[str, str] = given(
        Named(PlainText(), SCENARIO_VARIABLES_MAX, _KEY),
        "texts for ${name}, which a run may set otherwise",
        default={},
    )
    defaults: TurnOptions = given(
        Record(TurnOptions), "how all answers are made", default=TurnOptions()
    )
    tools: Mapping[str, ToolStub] = given(
        Named(Record(ToolStub), SCENARIO_TOOLS_MAX, _TOOL), "tools and their answers", default={}
    )

    def shown_name(self, agent: str) -> str:
        """Return what others hear an agent called."""
        return self.agents[agent].name or agent

    def phase(self, phase_id: str) -> Phase:
        return next(phase for phase in self.phases if phase.id == phase_id)

    def options(self, agent: str) -> TurnOptions:
        """Return how an agent's answers are made: its own wishes, then those of all."""
        role, common = self.agents[agent], self.defaults
        return TurnOptions(
            common.max_tokens if role.max_tokens is None else role.max_tokens,
            common.temperature if role.temperature is None else role.temperature,
            role.edits or common.edits,
        )
