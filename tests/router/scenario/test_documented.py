"""Examples of docs/scenarios.md parse, and the page has every field."""

import re
from pathlib import Path

import pytest

from router.scenario.diagnostics import ScenarioError
from router.scenario.kinds import yaml_fields
from router.scenario.reader import read_scenario
from router.scenario.scenario import (
    CannedAnswer,
    Expectation,
    Fanout,
    MemoryEdit,
    Phase,
    PlaceHint,
    Role,
    Scenario,
    ToolStub,
    TurnOptions,
)
from router.scenario.tool_answers import answer_call

PAGE = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
EXAMPLE = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
RECORDS = (Scenario, Role, Phase, ToolStub, CannedAnswer, Expectation)
RECORDS += (Fanout, MemoryEdit, PlaceHint, TurnOptions)


def test_example_is_read_and_its_error_is_as_documented():
    assert read_scenario(EXAMPLE.encode(), "two-rooms.yaml").name == "two-rooms"
    with pytest.raises(ScenarioError) as caught:
        read_scenario(EXAMPLE.replace("[marco, danny]", "[marco, dany]").encode(), "two-rooms.yaml")
    assert caught.value.message in PAGE


def test_tools_example_is_read():
    text = PAGE[PAGE.index("## Tools") :]
    example = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    scenario = read_scenario(example.encode(), "records-office.yaml")
    assert answer_call(scenario, "clerk", "look_up", {"name": "Mira"}).endswith("Street 7.")
    assert answer_call(scenario, "clerk", "look_up", {"name": "Ann"}) == "no such person"


def test_every_field_is_documented():
    names = {name for record in RECORDS for name in yaml_fields(record)}
    assert len(names) > 40
    assert {name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)} == set()
