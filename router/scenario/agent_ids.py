"""By which names the fabric knows a scenario's agents: their memory outlives runs by these."""

import re

from fabric.errors import RejectedError
from fabric.ids import AgentId, parse_agent_id
from router.limits import SCENARIO_KEY_CHARS_MAX
from router.scenario.complaints import told
from router.scenario.scenario import Lifetime, Scenario

_RUN = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{SCENARIO_KEY_CHARS_MAX - 1}}}")


def agent_id(scenario: Scenario, agent: str, run: str, namespace: str = "") -> AgentId:
    """Return an agent's id: the same in all runs of a namespace, or this run's own.

    Args:
        scenario: whose name is part of it.
        agent: its key there.
        run: the run's id.
        namespace: keeps the permanent agents of one series of runs apart from others'.
    """
    require_run_name(run)
    if namespace:
        require_run_name(namespace, "as")
    place = f"{scenario.name}@{namespace}" if namespace else scenario.name
    if scenario.agents[agent].lifetime is Lifetime.EPHEMERAL:
        place = f"{place}.{run}"
    return parse_agent_id(f"scn.{place}.{agent}")


def require_run_name(name: str, param: str = "run") -> None:
    """Raise RejectedError for what is no name of a run or of a series."""
    if not _RUN.fullmatch(name):
        rule = f"use lower-case letters, digits, _ and -, {SCENARIO_KEY_CHARS_MAX} at most"
        message = f"'{told(name)}' is no valid name: {rule}"
        raise RejectedError(message, code="invalid_value", param=param)
