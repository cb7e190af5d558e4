"""Classes of a scenario. Their fields are the table for the reader and the JSON schema."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fabric.edit_mode import EditMode
from fabric.limits import COMPLETION_TOKENS_MAX
from router.limits import (
    QUOTED_NAME_CHARS_MAX,
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
    EnumMember,
    IntegerRange,
    JsonObject,
    ListOf,
    MapOf,
    Nullable,
    NumberRange,
    OneOrMany,
    PlainText,
    Record,
    TemplateText,
    scenario_field,
)
from router.scenario.template import TextTemplate

# Line ends, control characters, invisible characters and changes of text direction.
_INVISIBLE = (
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
    QUOTED_NAME_CHARS_MAX, re.compile(rf"[^{_INVISIBLE}]*"), "one line without invisible characters"
)
_SHOWN = PlainText(
    SCENARIO_NAME_CHARS_MAX,
    re.compile(rf"[^\s:\[\]{_INVISIBLE}](?:[^:\[\]{_INVISIBLE}]*[^\s:\[\]{_INVISIBLE}])?"),
    "one line without colons, brackets and invisible characters, as it stands before speech",
)
_KEYS = ListOf(_KEY, SCENARIO_AGENTS_MAX)
_SPOKEN = OneOrMany(TemplateText(), ListOf(TemplateText(), SCENARIO_ITEMS_MAX, 1, is_unique=False))


class Lifetime(StrEnum):
    """Lifetime of an agent's memory."""

    PERMANENT = "permanent"  # its id is the same in every run
    EPHEMERAL = "ephemeral"  # its id belongs to one run


class TurnOrder(StrEnum):
    """Order in which the agents of a phase speak and hear each other."""

    IN_TURN = "in_turn"  # each hears the earlier speakers
    PARALLEL = "parallel"  # all speak at once in a round, and hear each other after it


class KeptEdits(StrEnum):
    """Treatment of memory after an edit, as in requests."""

    EXACT = "exact"
    AMORTIZE = "amortize"


_TOKENS = IntegerRange(1, COMPLETION_TOKENS_MAX)
_TEMPERATURE = NumberRange(0.0, 2.0)
_DESCRIPTION_OF_TOKENS = "tokens that one answer may have"
_DESCRIPTION_OF_TEMPERATURE = "0 for the same answers each time"
_DESCRIPTION_OF_EDITS = "cache after an edit: recomputed (exact) or kept (amortize)"


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options of turns; None leaves an option to the fabric."""

    max_tokens: int | None = scenario_field(_TOKENS, _DESCRIPTION_OF_TOKENS, default=None)
    temperature: float | None = scenario_field(
        _TEMPERATURE, _DESCRIPTION_OF_TEMPERATURE, default=None
    )
    edits: KeptEdits | None = scenario_field(
        EnumMember(KeptEdits), _DESCRIPTION_OF_EDITS, default=None
    )


@dataclass(frozen=True, slots=True)
class PlaceHint:
    """Placement hint of an agent; one that cannot be met is no error."""

    node: str | None = scenario_field(_KEY, "the node that it begins on", default=None)
    apart_from: tuple[str, ...] | None = scenario_field(
        _KEYS, "agents on whose nodes it is not to begin", default=None
    )
    together_with: tuple[str, ...] | None = scenario_field(
        _KEYS, "agents on whose node it is to begin", default=None, called="with"
    )


@dataclass(frozen=True, slots=True)
class Role:
    """Declaration of an agent."""

    name: str | None = scenario_field(
        _SHOWN, "the name that others hear; its key by default", default=None
    )
    lifetime: Lifetime = scenario_field(
        EnumMember(Lifetime),
        "permanent: its memory outlives runs; ephemeral: of one run",
        default=Lifetime.PERMANENT,
    )
    system: TextTemplate | None = scenario_field(
        TemplateText(), "its system prompt; ${variable} is filled in", default=None
    )
    place: PlaceHint | None = scenario_field(
        Record(PlaceHint, ("node", "apart_from", "with")), "where it begins to live", default=None
    )
    tools: tuple[str, ...] = scenario_field(
        ListOf(_TOOL, SCENARIO_TOOLS_MAX), "names of `tools` that it may call", default=()
    )
    max_tokens: int | None = scenario_field(_TOKENS, _DESCRIPTION_OF_TOKENS, default=None)
    temperature: float | None = scenario_field(
        _TEMPERATURE, _DESCRIPTION_OF_TEMPERATURE, default=None
    )
    edits: KeptEdits | None = scenario_field(
        EnumMember(KeptEdits), _DESCRIPTION_OF_EDITS, default=None
    )


@dataclass(frozen=True, slots=True)
class CannedAnswer:
    """A tool's answer to certain arguments."""

    text: TextTemplate = scenario_field(TemplateText(), "the answer")
    when: Mapping[str, Any] | None = scenario_field(
        JsonObject(), "arguments that the call must have; any by default", default=None
    )


@dataclass(frozen=True, slots=True)
class ToolStub:
    """A tool that agents may call; nothing is executed, answers are looked up."""

    description: str = scenario_field(PlainText(), "description for the model")
    parameters: Mapping[str, Any] = scenario_field(JsonObject(), "JSON schema of its arguments")
    answers: tuple[CannedAnswer, ...] = scenario_field(
        ListOf(Record(CannedAnswer), SCENARIO_ITEMS_MAX, 1, is_unique=False),
        "the first one whose `when` matches the arguments is used",
    )


@dataclass(frozen=True, slots=True)
class Fanout:
    """Fork of an agent into several that begin with its memory."""

    source: str = scenario_field(_KEY, "the agent whose memory is copied", called="from")
    copies: tuple[str, ...] = scenario_field(
        ListOf(_KEY, SCENARIO_AGENTS_MAX, 1), "the agents that begin with it", called="as"
    )


@dataclass(frozen=True, slots=True)
class MemoryEdit:
    """Edit of one agent's history, from a phase on."""

    agent: str = scenario_field(_KEY, "the agent whose memory is edited")
    clear_results_of: str | None = scenario_field(
        _TOOL, "the tool whose earlier results are replaced by [cleared]", default=None
    )
    forget: str | None = scenario_field(_KEY, "the phase whose messages are removed", default=None)
    mode: EditMode = scenario_field(
        EnumMember(EditMode),
        "forget: recompute the cache after the edit; amortize: keep it",
        default=EditMode.FORGET,
    )


@dataclass(frozen=True, slots=True)
class Expectation:
    """Condition that must hold after a phase."""

    agent: str | None = scenario_field(_KEY, "the agent that it is about", default=None)
    says: TextTemplate | tuple[TextTemplate, ...] | None = scenario_field(
        _SPOKEN, "texts, one of which it says in this phase", default=None
    )
    never_says: TextTemplate | tuple[TextTemplate, ...] | None = scenario_field(
        _SPOKEN, "texts that it does not say in this phase", default=None
    )
    hears: TextTemplate | tuple[TextTemplate, ...] | None = scenario_field(
        _SPOKEN, "texts, one of which it has heard so far", default=None
    )
    never_hears: TextTemplate | tuple[TextTemplate, ...] | None = scenario_field(
        _SPOKEN, "texts that it has never heard", default=None
    )
    calls: str | None = scenario_field(_TOOL, "the tool that it calls in this phase", default=None)
    cached_share_min: float | None = scenario_field(
        NumberRange(0.0, 1.0), "share of this phase's prompts that was cached", default=None
    )


CHECKS = ("says", "never_says", "hears", "never_hears", "calls", "cached_share_min")
AskTexts = TextTemplate | tuple[TextTemplate | None, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Rounds in which agents speak with each other."""

    id: str = scenario_field(_KEY, "its name for other phases")
    agents: tuple[str, ...] = scenario_field(
        ListOf(_KEY, SCENARIO_AGENTS_MAX, 1), "the speakers, in order"
    )
    title: str | None = scenario_field(
        _LINE, "the line that begins it; its id by default", default=None
    )
    rounds: int = scenario_field(
        IntegerRange(1, SCENARIO_ROUNDS_MAX), "number of turns of each speaker", default=1
    )
    order: TurnOrder = scenario_field(
        EnumMember(TurnOrder),
        "in_turn: each hears the earlier speakers; parallel: all speak at once in a round",
        default=TurnOrder.IN_TURN,
    )
    visible_to: tuple[str, ...] | None = scenario_field(
        _KEYS,
        "the agents that hear what is said; by default its speakers; [] for none",
        default=None,
    )
    after: tuple[str, ...] | None = scenario_field(
        ListOf(_KEY, SCENARIO_PHASES_MAX),
        "phases that must have ended; by default all before it",
        default=None,
    )
    opening: TextTemplate | None = scenario_field(
        TemplateText(), "text for all who hear the phase, at its start", default=None
    )
    prompts: Mapping[str, TextTemplate] = scenario_field(
        MapOf(TemplateText(), SCENARIO_AGENTS_MAX, _KEY),
        "text for one agent only, at its start",
        default={},
    )
    ask: Mapping[str, AskTexts] = scenario_field(
        MapOf(
            OneOrMany(
                TemplateText(),
                ListOf(Nullable(TemplateText()), SCENARIO_ROUNDS_MAX, 1, is_unique=False),
            ),
            SCENARIO_AGENTS_MAX,
            _KEY,
        ),
        "text for one agent before each of its turns; a list has one text for each round, "
        "and null where it does not speak",
        default={},
    )
    fork: Fanout | None = scenario_field(
        Record(Fanout), "agents that begin with the memory of another one", default=None
    )
    directives: tuple[MemoryEdit, ...] = scenario_field(
        ListOf(
            Record(MemoryEdit, ("clear_results_of", "forget")),
            SCENARIO_ITEMS_MAX,
            is_unique=False,
        ),
        "memory edits before the phase",
        default=(),
    )
    expect: tuple[Expectation, ...] = scenario_field(
        ListOf(Record(Expectation, CHECKS), SCENARIO_ITEMS_MAX, is_unique=False),
        "conditions after the phase",
        default=(),
    )

    @property
    def hearers(self) -> frozenset[str]:
        """Agents that hear anything of the phase."""
        return frozenset(self.agents) | frozenset(self.visible_to or ())

    @property
    def listeners(self) -> frozenset[str]:
        """Agents that hear another agent speak in the phase."""
        agents = {*self.agents, *(self.visible_to or ())}
        others = ((agent, speaker) for agent in agents for speaker in self.agents)
        return frozenset(a for a, s in others if a != s and self.hears(a, s))

    def hears(self, listener: str, speaker: str) -> bool:
        """Return whether an agent hears another one in this phase."""
        heard_by = self.agents if self.visible_to is None else self.visible_to
        return listener == speaker or listener in heard_by

    def ask_text(self, agent: str, number: int) -> TextTemplate | None:
        """Return the text before an agent's turn in a round; rounds count from 1."""
        texts = self.ask.get(agent)
        return texts[number - 1] if isinstance(texts, tuple) else texts

    def speakers(self, number: int) -> Iterator[str]:
        """Yield the speakers of a round, in order."""
        for agent in self.agents:
            listed = isinstance(self.ask.get(agent), tuple)
            if not listed or self.ask_text(agent, number) is not None:
                yield agent

    @property
    def turns(self) -> Iterator[tuple[int, str]]:
        """Yield rounds with their speakers, in order."""
        for number in range(1, self.rounds + 1):
            for agent in self.speakers(number):
                yield number, agent


@dataclass(frozen=True, slots=True)
class Scenario:
    """Content of a scenario file."""

    name: str = scenario_field(_NAME, "its name, part of its agents' ids", called="scenario")
    agents: Mapping[str, Role] = scenario_field(
        MapOf(Record(Role), SCENARIO_AGENTS_MAX, _KEY, 1), "the agents that take part"
    )
    phases: tuple[Phase, ...] = scenario_field(
        ListOf(Record(Phase), SCENARIO_PHASES_MAX, 1, is_unique=False), "the phases, in order"
    )
    title: str | None = scenario_field(_LINE, "title for lists", default=None)
    variables: Mapping[str, str] = scenario_field(
        MapOf(PlainText(), SCENARIO_VARIABLES_MAX, _KEY),
        "texts for ${name}, which a run may replace",
        default={},
    )
    defaults: TurnOptions = scenario_field(
        Record(TurnOptions), "options of all turns", default=TurnOptions()
    )
    tools: Mapping[str, ToolStub] = scenario_field(
        MapOf(Record(ToolStub), SCENARIO_TOOLS_MAX, _TOOL), "tools and their answers", default={}
    )

    def shown_name(self, agent: str) -> str:
        """Return the name of an agent that others hear."""
        return self.agents[agent].name or agent

    def phase(self, phase_id: str) -> Phase:
        return next(phase for phase in self.phases if phase.id == phase_id)

    def options(self, agent: str) -> TurnOptions:
        """Return the options of an agent's turns: its own, or the defaults."""
        role, common = self.agents[agent], self.defaults
        return TurnOptions(
            common.max_tokens if role.max_tokens is None else role.max_tokens,
            common.temperature if role.temperature is None else role.temperature,
            role.edits or common.edits,
        )
