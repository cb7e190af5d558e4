"""Reuse by each turn of agent programs over the families' templates.

At least 97 % of what an exact match with anything computed before could reuse, and one agent for
each conversation, whether the client names it or not. `make test` tries a core of the matrix.
"""

from itertools import product

import pytest

from fabric.ids import AgentId, TenantId
from tests.support.agent_traffic import SCENARIOS, Driver, Talk, corpus, drop_thought, words
from tests.support.nasty_traffic import NASTY
from tests.support.samples import sample
from tests.support.scripted_answers import scripted
from tests.support.services import TENANT, ask, running
from tests.support.template_shapes import SHAPES, WEIGHTS, write_shape
from tests.support.tiny_models import LLAMA, write_model

SHARE_MIN = 0.97
LOST_TOKENS_MAX = 512  # of any turn
AGENTS = {
    "date_at_the_head": 3,
    "sub_agents": 3,
    "date_at_the_end": 3,
    "interleaved": 2,
}  # conversations in each
# A client that goes back or omits messages starts another conversation.
FORKS = {"edit_last", "edit_early", "compact", "slide"}
# Formats whose calls are read; of others, results are messages of the user, whose words count.
CALLS_READ = {
    *("chatml", "thought_opened", "thought_closed", "thinks", "thoughts_kept", "role_tokens"),
}
CORE = {
    ("full", "thought_opened"): ("chat", "tools_kept"),
    ("full", "role_tokens"): ("chat_kept",),
    ("full", "head_at_last_question"): ("chat",),
    ("recurrent", "thought_opened"): ("interleaved", "edit_last"),
}
# A head that moves with the last question is in no later prompt of its conversation, so its
# record drops it: prompts that begin with it, or return to it, do not find it.
HEAD_GONE = {
    ("head_at_last_question", name)
    for name in (
        *("date_at_the_end", "edit_early", "compact", "sub_agents", "slide"),
        *("date_at_the_head", "elided", "reminded"),
    )
}
# A message changed in its middle has no recurrent state at the place of the change.
NASTY_SHARE_MIN = {"full": SHARE_MIN, "recurrent": 0.9}


def converse(tmp_path, weights, shape, scenarios, *, has_ids):
    """Play the scenarios on one node, each as a tenant of its own; return their drivers."""
    model = write_shape(tmp_path / "model", shape, weights, corpus())
    drivers = {}
    with scripted() as script, running(tmp_path, str(model)) as service:
        for number, name in enumerate(scenarios):
            tenant = TenantId(f"tenant-{number}")
            drivers[name] = Driver(service, shape, script, has_ids, tenant)
            {**SCENARIOS, **NASTY}[name](drivers[name])
    return drivers


def judge(shape, drivers, share_min=SHARE_MIN):
    found = []
    for name, driver in drivers.items():
        turns = [(turn.prompt, turn.cached, turn.possible) for turn in driver.turns]
        agents = len({turn.agent for turn in driver.turns})
        forks = FORKS if shape in CALLS_READ else FORKS | {"elided"}
        if agents != AGENTS.get(name, 1) and not (name in forks and not driver.has_ids):
            found.append(f"{name}: {agents} agents")
        lost = max(turn.possible - turn.cached for turn in driver.turns)
        if lost > LOST_TOKENS_MAX and (shape, name) not in HEAD_GONE:
            found.append(f"{name}: {lost} tokens computed again")
        last = driver.turns[-1]
        keeps = driver.shape.options.get("preserve_thinking")
        if keeps and name == "long_loop" and last.cached < 0.9 * last.prompt:
            found.append(f"{name}: a question after the loop reuses {last.cached}")
        if driver.share < share_min and (shape, name) not in HEAD_GONE:
            found.append(f"{name}: {driver.share:.0%} of {turns}")
    assert not found, found


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "shape"), CORE, ids=str)
def test_second_turn_is_warm_without_an_agent_id(tmp_path, weights, shape):
    scenarios = CORE[weights, shape]
    judge(shape, converse(tmp_path, weights, SHAPES[shape], scenarios, has_ids=False))


@pytest.mark.nightly
@pytest.mark.parametrize("has_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize(("weights", "shape"), list(product(WEIGHTS, SHAPES)), ids=str)
def test_reuse_of_every_scenario_with_every_template(tmp_path, weights, shape, has_ids):
    judge(shape, converse(tmp_path, weights, SHAPES[shape], SCENARIOS, has_ids=has_ids))


@pytest.mark.nightly
@pytest.mark.parametrize(("weights", "shape"), list(product(WEIGHTS, SHAPES)), ids=str)
def test_reuse_of_adversarial_scenarios_with_every_template(tmp_path, weights, shape):
    drivers = converse(tmp_path, weights, SHAPES[shape], NASTY, has_ids=False)
    judge(shape, drivers, NASTY_SHARE_MIN[weights])


@pytest.mark.slow
@pytest.mark.parametrize("has_ids", sample([False, True], True), ids=["no ids", "ids"])
def test_turn_of_a_recurrent_model_computes_new_text_only(tmp_path, has_ids):
    """If a thought is dropped from the history: the answer, the question, some tokens."""
    shape = SHAPES["thought_opened"]
    drivers = converse(tmp_path, "recurrent", shape, ["chat", "tools_kept"], has_ids=has_ids)
    for driver in drivers.values():
        for turn in driver.turns[1:]:
            assert turn.prompt - turn.cached <= turn.prompt - turn.possible + 512
            assert turn.possible - turn.cached < 16


@pytest.mark.slow
def test_recurrent_state_at_the_end_of_an_answers_text_is_on_disk(tmp_path):
    shape = SHAPES["thoughts_kept"]  # its template strips the line end of the answer
    model = str(write_shape(tmp_path / "model", shape, "recurrent", corpus()))
    with scripted() as script:
        with running(tmp_path, model) as service:
            driver = Driver(service, shape, script)
            talk = Talk(driver, echo=drop_thought)
            talk.ask(text=f"{words(7, 30)}\n")
            script.end = None  # a node tests itself as it starts
        with running(tmp_path, model) as driver.service:
            talk.ask()
            script.end = None
    assert driver.turns[1].cached == driver.turns[1].possible > driver.turns[0].prompt + 60


@pytest.mark.slow
def test_recurrent_state_at_a_divergence_serves_the_next_conversation(tmp_path):
    """They diverge within a line, without a mark: the second one leaves a state there."""
    model = write_shape(tmp_path / "model", SHAPES["chatml"], "recurrent", corpus())
    with scripted() as script, running(tmp_path, str(model)) as service:
        driver = Driver(service, SHAPES["chatml"], script)
        for number in range(3):
            Talk(driver, system=f"{words(1, 300)} {words(10 + number, 200)}").ask()
    _, second, third = driver.turns
    assert second.possible - second.cached > 30
    assert third.possible - third.cached < 16


def test_reused_agent_id_keeps_the_common_prefix_only(tmp_path):
    """Its id is reused for another conversation: only the exact common prefix stays."""
    model = str(write_model(tmp_path / "llama", LLAMA))
    system = {"role": "system", "content": words(1, 30)}
    with running(tmp_path, model) as service:
        long = ask(service, [system, {"role": "user", "content": words(2, 240)}], agent="a")
        agent = service.node.resources.table.get((TENANT, AgentId("a")))
        held_bytes = agent.hot_bytes
        other = ask(service, [system, {"role": "user", "content": words(9, 5)}], agent="a")
        kept = other.admitted.cached_tokens

        assert 30 < kept < long.admitted.prompt_tokens // 4
        assert other.admitted.cache == "hot"
        assert f"differs after token {kept} of" in other.admitted.match_reason
        assert agent.hot_bytes < held_bytes // 2
        cold = ask(
            service, [system, {"role": "user", "content": words(9, 5)}], tenant=TenantId("b")
        )
        assert cold.text == other.text
