"""Sub-agents of real coding agents: their sessions by header, and the order of their turns."""

import re

import pytest

from fabric.turn.generation import GenerateRequest
from fabric.turn.messages import MessageRole
from router.api import turn_route
from router.http.turn_headers import sub_agent_of
from tests.clients.obedience import GREETING, Obeying, answer, instance, obeying
from tests.clients.session_programs import CODING_AGENTS
from tests.support.template_shapes import ScriptedAnswer

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
DELEGATE = "Let helpers say hello, one after the other."
TASK = "Greet the reader of this."
DELEGATORS = ("Agent", "Task", "task", "agent", "spawn_agent")
TIMES = 4
CONTEXT_TOKENS = 81_920
DELEGATING = ("claude-code", "opencode")  # Qwen Code, too, but its side requests have no session
PROGRAMS = [agent for agent in CODING_AGENTS if agent.group in DELEGATING]
NAMED = ("claude-code",)  # the agents whose sub-agents have their own names


def delegating(request: GenerateRequest) -> ScriptedAnswer:
    """Delegate greetings to sub-agents, one after the other; answer everything else as usual."""
    messages = request.messages or ()
    last_user = max((i for i, m in enumerate(messages) if m.role is MessageRole.USER), default=0)
    question = "".join(messages[last_user].texts) if messages else ""
    tools = {tool["function"]["name"]: tool["function"] for tool in request.tools or ()}
    delegator = next((name for name in DELEGATORS if name in tools), None)
    results = sum(message.role is MessageRole.TOOL for message in messages[last_user:])
    if delegator is None or DELEGATE not in question or results >= TIMES:
        return answer(request)
    schema = tools[delegator]["parameters"]
    needed = {name: schema["properties"][name] for name in schema.get("required", ())}
    arguments = instance({**schema, "properties": needed})
    arguments |= {"prompt": f"{TASK} Number {results}."}
    if "subagent_type" in schema["properties"]:
        kind = "general" if delegator == "task" else "general-purpose"
        arguments |= {"subagent_type": kind}
    return ScriptedAnswer("", "A helper may greet.", (delegator, arguments))


@pytest.fixture
def hints(monkeypatch):
    """Collect the sessions and sub-agents of all turns at the router."""
    found, session_of = [], turn_route.session_of

    def record_and_return(headers):
        found.append((session_of(headers), sub_agent_of(headers)))
        return found[-1][0]

    monkeypatch.setattr(turn_route, "session_of", record_and_return)
    return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with obeying(folder, answers=delegating, context_tokens=CONTEXT_TOKENS) as served:
        yield served


def right_guesses(rig: Obeying) -> float:
    text = rig.fabric.http.get("/metrics").text
    found = re.search(r'macfabric_guessed_turns_total\{outcome="right"\} (\S+)', text)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_parent_is_loaded_while_its_sub_agents_answer(rig, hints, program, tmp_path):
    """The parent is guessed after it returned from two sub-agents; right guesses are counted."""
    before, first = right_guesses(rig), len(rig.model.turns)
    with program.home(rig.fabric.url, tmp_path) as home:
        assert GREETING in home.ask(DELEGATE)
    turns = rig.model.turns[first:]
    agents = {turn.request.identity for turn in turns}
    print(
        f"{program}: {len(turns)} turns, identities {agents}, {right_guesses(rig) - before} right"
    )

    assert right_guesses(rig) - before >= TIMES - 2
    assert len({session for session, _ in hints}) == 1, "parent and sub-agents must share a session"
    if program.group in NAMED:
        assert len({name for _, name in hints} - {None}) == TIMES
