"""Checks between the parts of a scenario: names, order of phases, and who may hear what."""

from collections.abc import Callable, Collection, Iterator
from typing import Final
from unicodedata import name as name_of
from unicodedata import normalize

from router.limits import SCENARIO_TURNS_MAX
from router.scenario.diagnostics import Path, suggest
from router.scenario.scenario import Expectation, Phase, Role, Scenario
from router.scenario.template import MessagesPlace, TextTemplate, VariablePlace
from router.scenario.turn_order import earlier_phases

_SIMILAR_ALPHABETS: Final = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "LISU")


def foreign_letter(text: str) -> str | None:
    """Return the first letter of a word that belongs to another, similar-looking alphabet."""
    for word in text.split():
        first = ""
        for letter in filter(str.isalpha, word):
            alphabet = name_of(letter, "").partition(" ")[0]
            if alphabet in _SIMILAR_ALPHABETS:
                first = first or alphabet
                if alphabet != first:
                    return letter
    return None


Finding = tuple[Path, str]
Refusal = Callable[[MessagesPlace], str | None]  # returns why a placeholder is not allowed

_NO_MESSAGES = "messages may be quoted to one agent only, in `prompts` or `ask` of a phase"


def findings(scenario: Scenario) -> Iterator[Finding]:
    """Yield the contradictions in a scenario whose parts are valid."""
    yield from _roles(scenario)
    yield from _tools(scenario)
    yield from _phase_ids(scenario)
    yield from _sharing(scenario)
    yield from _forks(scenario)
    ended = earlier_phases(scenario)
    for at, phase in enumerate(scenario.phases):
        yield from _within(("phases", at), _phase(scenario, at, ended[phase.id]))


def _within(path: Path, found: Iterator[Finding]) -> Iterator[Finding]:
    for inner, text in found:
        yield (*path, *inner), text


def _roles(scenario: Scenario) -> Iterator[Finding]:
    shown: dict[str, str] = {"you": "you"}
    for key, role in scenario.agents.items():
        name = scenario.shown_name(key)
        other = shown.setdefault(normalize("NFKC", name).casefold(), key)
        if other != key:
            whose = "means the hearer" if other == "you" else f"is the name of '{other}'"
            yield ("agents", key, "name"), f"'{name}' {whose}; give it a `name` of its own"
        if role.name is not None and (odd := foreign_letter(name)) is not None:
            text = f"'{name}' mixes alphabets: '{odd}' (U+{ord(odd):04X}) looks like another letter"
            yield ("agents", key, "name"), f"{text}; write the word in one alphabet"
        for at, tool in enumerate(role.tools):
            yield from _check_name(("agents", key, "tools", at), tool, scenario.tools, "a tool")
        if role.place is not None:
            for field in ("apart_from", "with"):
                named = role.place.apart_from if field == "apart_from" else role.place.together_with
                path: Path = ("agents", key, "place", field)
                yield from _all_known(path, named or (), scenario.agents, "an agent")
        yield from _check_places(
            scenario, ("agents", key, "system"), role.system, lambda _: _NO_MESSAGES
        )


def _tools(scenario: Scenario) -> Iterator[Finding]:
    for name, tool in scenario.tools.items():
        for at, answer in enumerate(tool.answers):
            path: Path = ("tools", name, "answers", at, "text")
            yield from _check_places(scenario, path, answer.text, lambda _: _NO_MESSAGES)


def _phase_ids(scenario: Scenario) -> Iterator[Finding]:
    seen: set[str] = set()
    turns = 0
    for at, phase in enumerate(scenario.phases):
        if phase.id in seen:
            yield ("phases", at, "id"), f"'{phase.id}' is the id of an earlier phase; take another"
        seen.add(phase.id)
        turns += phase.rounds * len(phase.agents)
    if turns > SCENARIO_TURNS_MAX:
        yield ("phases",), f"{turns:,} turns, more than {SCENARIO_TURNS_MAX:,}; lower the rounds"


def _sharing(scenario: Scenario) -> Iterator[Finding]:
    """Yield agents that take part in two phases which may run in parallel."""
    ended = earlier_phases(scenario)
    for at, phase in enumerate(scenario.phases):
        before = {other.id for other in scenario.phases[:at]}
        if not before.issuperset(phase.after or ()):
            continue  # unknown names in its `after` are reported elsewhere
        for other in scenario.phases[:at]:
            common = sorted(_involved_agents(phase) & _involved_agents(other))
            if common and other.id != phase.id and other.id not in ended[phase.id]:
                both = f"'{common[0]}' takes part in both; add '{other.id}' to `after`"
                text = f"would run beside '{other.id}', and {both}"
                yield ("phases", at, "after"), text


def _involved_agents(phase: Phase) -> frozenset[str]:
    source = (phase.fork.source,) if phase.fork else ()
    return phase.hearers.union(source, (edit.agent for edit in phase.directives))


def _forks(scenario: Scenario) -> Iterator[Finding]:
    ended = earlier_phases(scenario)
    for at, phase in enumerate(scenario.phases):
        if phase.fork is None:
            continue
        path: Path = ("phases", at, "fork")
        before = [other for other in scenario.phases[:at] if other.id in ended[phase.id]]
        yield from _check_name((*path, "from"), phase.fork.source, scenario.agents, "an agent")
        source = phase.fork.source
        if source in scenario.agents and not any(_speaks(source, other) for other in before):
            yield (*path, "from"), f"'{source}' has not spoken before this phase; begin with it"
        for n, copy in enumerate(phase.fork.copies):
            where = (*path, "as", n)
            earlier = [
                other.id for other in scenario.phases[:at] if copy in _involved_agents(other)
            ]
            if copy not in phase.agents:
                yield where, f"'{copy}' is not among the phase's agents; add it there"
            elif earlier:
                yield where, f"'{copy}' has a memory of its own since '{earlier[0]}'; take another"
            elif copy == phase.fork.source:
                yield where, f"'{copy}' cannot begin with its own memory; leave it out"
            elif copy in scenario.agents and source in scenario.agents:
                yield from _unlike(where, copy, scenario.agents[copy], scenario.agents[source])


def _speaks(agent: str, phase: Phase) -> bool:
    return any(speaker == agent for _, speaker in phase.turns)


def _unlike(path: Path, copy: str, role: Role, source: Role) -> Iterator[Finding]:
    """Yield settings that would make a fork's prompts differ from its source's history."""
    begins = f"'{copy}' begins with another agent's memory"
    if role.system is not None:
        yield path, f"{begins}; leave out its `system`, or tell it in `prompts`"
    if role.tools != source.tools:
        yield path, f"{begins}; give it the same `tools` in the same order"


def _phase(scenario: Scenario, number: int, ended: frozenset[str]) -> Iterator[Finding]:
    phase = scenario.phases[number]
    earlier = [other.id for other in scenario.phases[:number]]
    yield from _all_known(("agents",), phase.agents, scenario.agents, "an agent")
    yield from _all_known(("visible_to",), phase.visible_to or (), scenario.agents, "an agent")
    for at, name in enumerate(phase.after or ()):
        if name == phase.id:
            yield ("after", at), f"'{name}' cannot come after itself; leave it out"
        else:
            yield from _check_name(("after", at), name, earlier, "an earlier phase")
    yield from _check_places(scenario, ("opening",), phase.opening, lambda _: _NO_MESSAGES)
    for agent, text in phase.prompts.items():
        yield from _among(("prompts", agent), agent, phase.hearers, "hear this phase")
        yield from _private(scenario, ("prompts", agent), text, agent, ended)
    yield from _asks(scenario, phase, ended)
    for at, edit in enumerate(phase.directives):
        yield from _check_name(
            ("directives", at, "an agent"), edit.agent, scenario.agents, "an agent"
        )
        if edit.forget is not None:
            path: Path = ("directives", at, "forget")
            yield from _check_name(path, edit.forget, ended, "an earlier phase")
        if edit.clear_results_of is not None:
            path = ("directives", at, "clear_results_of")
            yield from _check_name(path, edit.clear_results_of, scenario.tools, "a tool")
    for at, expected in enumerate(phase.expect):
        yield from _within(("expect", at), _expectation(scenario, phase, expected))


def _asks(scenario: Scenario, phase: Phase, ended: frozenset[str]) -> Iterator[Finding]:
    for agent, ask in phase.ask.items():
        yield from _among(("ask", agent), agent, phase.agents, "speak in this phase")
        texts = ask if isinstance(ask, tuple) else (ask,)
        if isinstance(ask, tuple) and len(ask) != phase.rounds:
            wanted = f"one for each of {phase.rounds} rounds"
            yield ("ask", agent), f"expected {wanted} (null: it does not speak), got {len(ask)}"
        for at, text in enumerate(texts):
            path: Path = ("ask", agent, at) if isinstance(ask, tuple) else ("ask", agent)
            yield from _private(scenario, path, text, agent, ended)


def _expectation(scenario: Scenario, phase: Phase, expected: Expectation) -> Iterator[Finding]:
    about_words = expected.cached_share_min is None
    speaks = (expected.says, expected.never_says, expected.calls)
    if expected.agent is None:
        if about_words:
            yield (), "'agent' is missing"
    elif expected.agent not in scenario.agents:
        yield from _check_name(("agent",), expected.agent, scenario.agents, "an agent")
    elif any(what is not None for what in speaks):
        yield from _among(("agent",), expected.agent, phase.agents, "speak in this phase")
    if expected.calls is not None:
        yield from _check_name(("calls",), expected.calls, scenario.tools, "a tool")
    for field in ("says", "never_says", "hears", "never_hears"):
        words = getattr(expected, field)
        for text in words if isinstance(words, tuple) else (words,):
            yield from _check_places(scenario, (field,), text, lambda _: _NO_MESSAGES)


def _private(
    scenario: Scenario, path: Path, text: TextTemplate | None, hearer: str, ended: frozenset[str]
) -> Iterator[Finding]:
    """Yield placeholders that would tell an agent about phases that it did not hear."""

    def refusal(place: MessagesPlace) -> str | None:
        known = {phase.id: phase for phase in scenario.phases}
        if place.phase not in known:
            return f"'{place.phase}' is not a phase; {suggest(place.phase, known)}"
        if place.phase not in ended:
            return f"'{place.phase}' has not ended when this phase begins; name an earlier one"
        if place.agent not in scenario.agents:
            return f"'{place.agent}' is not an agent; {suggest(place.agent, scenario.agents)}"
        if place.agent != hearer:
            shown = f"${{{place.phase}.messages[{hearer}]}}"
            return f"'{hearer}' reads this text, so write {shown}"
        if hearer not in known[place.phase].hearers:
            heard = "add it to that phase's `visible_to`, or leave this out"
            return f"'{hearer}' did not hear '{place.phase}'; {heard}"
        return None

    yield from _check_places(scenario, path, text, refusal)


def _check_places(
    scenario: Scenario, path: Path, text: TextTemplate | None, refusal: Refusal
) -> Iterator[Finding]:
    for place in text.places if text is not None else ():
        if isinstance(place, VariablePlace):
            if place.name not in scenario.variables:
                close = suggest(place.name, scenario.variables)
                yield path, f"'${{{place.name}}}' is not a variable; {close}"
        elif (reason := refusal(place)) is not None:
            yield path, f"${{{place.phase}.messages[{place.agent}]}}: {reason}"


def _all_known(
    path: Path, names: Collection[str], known: Collection[str], what: str
) -> Iterator[Finding]:
    for at, name in enumerate(names):
        yield from _check_name((*path, at), name, known, what)


def _check_name(path: Path, name: str, known: Collection[str], what: str) -> Iterator[Finding]:
    if name not in known:
        yield path, f"'{name}' is not {what}; {suggest(name, known)}"


def _among(path: Path, name: str, allowed: Collection[str], what: str) -> Iterator[Finding]:
    if name not in allowed:
        yield path, f"'{name}' does not {what}; {suggest(name, allowed)}"
