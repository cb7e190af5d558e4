"""Tools of a scenario: their definitions and canned answers; nothing is executed."""

from collections.abc import Iterator, Mapping
from typing import Any

from fabric.codec import parse_json
from fabric.errors import RejectedError
from router.scenario.diagnostics import shorten
from router.scenario.scenario import Scenario
from router.scenario.template import MessagesPlace, VariablePlace, render


def offered_tools(scenario: Scenario, agent: str) -> list[dict[str, Any]]:
    """Return an agent's tools in the form that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": scenario.tools[name].description,
                "parameters": dict(scenario.tools[name].parameters),
            },
        }
        for name in scenario.agents[agent].tools
    ]


def answer_call(
    scenario: Scenario, agent: str, tool: str, arguments: Mapping[str, Any] | str
) -> str:
    """Return the answer to a call, or an error text for the model."""
    if tool not in scenario.agents[agent].tools:
        return f"Error: there is no tool '{shorten(tool)}'"
    values = _object(arguments)
    if values is None:
        return "Error: the arguments are no JSON object"

    def fill(place: VariablePlace | MessagesPlace) -> Iterator[str]:
        assert isinstance(place, VariablePlace), "the reader refuses messages here"
        yield scenario.variables[place.name]

    for answer in scenario.tools[tool].answers:
        if answer.when is None or _is_part(answer.when, values):
            return render(answer.text, fill)
    return "Error: nothing is known for these arguments"


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | None:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = parse_json(arguments)
    except RejectedError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _is_part(part: Any, whole: Any) -> bool:
    """Return whether all entries of a map, at any depth, are in another one."""
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(key in whole and _is_part(part[key], whole[key]) for key in part)
    return bool(part == whole) and isinstance(part, bool) == isinstance(whole, bool)
