"""Variables of a scenario, as one run has them."""

from collections.abc import Mapping
from dataclasses import replace

from fabric.errors import RejectedError
from router.limits import SCENARIO_TEXT_CHARS_MAX
from router.scenario.complaints import meant, told
from router.scenario.scenario import Scenario


def with_variables(scenario: Scenario, chosen: Mapping[str, str]) -> Scenario:
    """Set variables for one run; raise RejectedError for one that the scenario does not have."""
    for name, text in chosen.items():
        param = f"set.{told(name)}"
        if name not in scenario.variables:
            message = f"'{told(name)}' is no variable; {meant(name, scenario.variables)}"
            raise RejectedError(message, code="invalid_value", param=param)
        if len(text) > SCENARIO_TEXT_CHARS_MAX:
            message = f"{param} is longer than {SCENARIO_TEXT_CHARS_MAX:,} characters"
            raise RejectedError(message, code="invalid_value", param=param)
    return replace(scenario, variables={**scenario.variables, **chosen})
