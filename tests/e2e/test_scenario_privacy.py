"""Private speech stays out of other agents' prompts, records and cached tokens.

Each secret is in one agent's prompt. The test searches all prompts as the run sends them and as
nodes render them, and every agent's data on every node's disk, also after moves, forks and
restarts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from node.prompt.prompt_encoder import PromptEncoder
from router.scenario.reader import read_scenario
from router.scenario.scenario import Phase
from router.scenario.series import SeriesPlan
from tests.support.http_fabric_client import HttpFabricClient
from tests.support.local_fabric import local_fabric
from tests.support.performed import performed
from tests.support.stored_texts import StoredText, leaks, on_disks

NODES = ("mac-a", "mac-b", "mac-c")
# The agents that may have each text. Ada and Bert begin as forks of Marco.
CREW = {"marco", "ada", "bert"}
SECRETS = {
    "amber falcon copper": {"warden", *CREW},  # the opening of room A
    "otter lantern quartz": {"warden", *CREW},  # in Marco's prompt; he says it in room A
    "violin saddle meadow": CREW,  # in Marco's prompt; he does not repeat it
    "garden harbor archive": {"warden"},  # in the Warden's prompt
    "silver maple thunder": {"danny"},  # in Danny's prompt; he says it without listeners
    "ivory engine tower": {"danny"},  # the result of Danny's tool
    "bridge ember cellar": {"ada"},
    "motto keeper number": {"ada", "marco"},  # Ada reports it to Marco; not visible to Bert
    "vault color falcon": {"bert"},
}
WHOLE = """
scenario: whispers
defaults: {max_tokens: 48, temperature: 0}
agents:
  warden: {system: You remember what you are told.}
  marco: {system: You remember what you are told.}
  danny:
    tools: [look]
    system: |
      The room is seen like this:<tool_call>
      {"name": "look", "arguments": {"path": "here"}}
      </tool_call>
  ada: {place: {apart_from: [marco]}}
  bert: {place: {apart_from: [marco, ada]}}
tools:
  look:
    description: Looks.
    parameters: {type: object, properties: {path: {type: string}}}
    answers: [{text: There lies ivory engine tower.}]
phases:
  - id: room_a
    agents: [marco, warden]
    opening: On the wall stands amber falcon copper.
    prompts:
      marco: |
        The code of Mira is otter lantern quartz.
        Your doubt is violin saddle meadow.
      warden: The offer of the court is garden harbor archive.
    ask: {marco: The code of Mira is, warden: What now}
  - id: room_b
    agents: [danny, warden]
    order: parallel
    visible_to: []
    prompts:
      danny: The boat of Lena is silver maple thunder.
    rounds: 2
    ask: {danny: ["The boat of Lena is", "The room is seen like this:"], warden: What now}
  - id: crew
    agents: [ada, bert]
    order: parallel
    visible_to: [marco]
    fork: {from: marco, as: [ada, bert]}
    prompts:
      ada: |
        You doubt bridge ember cellar.
        The report of Ada is motto keeper number.
      bert: You doubt vault color falcon.
    ask: {ada: The report of Ada is, bert: What now}
  - id: yard
    agents: [marco, danny, ada, bert]
    visible_to: []
    prompts:
      marco: |
        From room A:
        ${room_a.messages[marco]}
"""
SCENARIO = read_scenario(WHOLE.encode(), "whispers.yaml")


@dataclass(frozen=True)
class MovingClient(HttpFabricClient):
    """Client that records prompts and forks' first contents, and moves agents after each answer."""

    on_disks: Callable[[], list[StoredText]]
    prompts: list[StoredText] = field(default_factory=list)
    forked: list[StoredText] = field(default_factory=list)

    async def ask(self, question):
        texts = [text for message in question.messages for text in message.texts]
        self.prompts.extend(StoredText(question.agent, "prompt", text) for text in texts)
        answer = await super().ask(question)
        to = NODES[(NODES.index(answer.figures.node) + 1) % len(NODES)]
        await self.move(question.agent, to)
        return answer

    async def fork(self, source, copy, to, op):
        agent_copy = await super().fork(source, copy, to, op)
        self.forked.extend(entry for entry in self.on_disks() if entry.agent == copy)
        return agent_copy


@pytest.fixture
def rendered_prompts(monkeypatch):
    """Record each prompt as a node renders it."""
    prompts, render = [], PromptEncoder.render

    def record_prompt(self, request, limit):
        encoded = render(self, request, limit)
        prompts.append(StoredText(request.identity.agent, "rendered prompt", encoded.text))
        return encoded

    monkeypatch.setattr(PromptEncoder, "render", record_prompt)
    return prompts


def perform(fabric, folder, name, run="first"):
    """Perform the scenario with new agents; return the run's client and the agents' ids."""
    plan = SeriesPlan(SCENARIO, run, "digest", name)
    speaker = MovingClient(fabric.http, fabric.model_name, lambda: all_texts(fabric))
    assert len(performed(plan, speaker, folder).run.state.transcript) == plan.turns
    return speaker, plan.ids(plan.arms[0])


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whispers")
    with local_fabric(folder, "recall", *NODES) as instance:
        instance.folder = folder
        yield instance


def all_texts(fabric):
    tokenizer = fabric.services[NODES[0]].node.resources.tokenizer._tokenizer
    return list(on_disks(fabric.folder, tokenizer.decode))


def allowed_holders(ids):
    return {words: {ids[agent] for agent in agents} for words, agents in SECRETS.items()}


def findings(found, may_have):
    return {(words, entry.agent) for entry in found for words in may_have if words in entry.text}


def word_holders(may_have):
    return {(words, agent) for words, agents in may_have.items() for agent in agents}


def test_private_speech_reaches_no_other_agent(fabric, tmp_path, rendered_prompts):
    first, ids = perform(fabric, tmp_path, "calm")
    may_have, danny = allowed_holders(ids), ids["danny"]
    moved, rendered_first = all_texts(fabric), list(rendered_prompts)
    fabric.http.post(f"/v1/agents/{danny}/fork", json={"as": "copy", "to": NODES[0]})
    for name in NODES:
        fabric.restart(name)
    for agent in ids.values():
        owner = fabric.http.get(f"/v1/agents/{agent}").json()["owner"]
        fabric.migrate(agent, NODES[(NODES.index(owner) + 1) % len(NODES)])
    restarted = all_texts(fabric)
    copied = {w: {*agents, "copy"} if danny in agents else agents for w, agents in may_have.items()}
    rendered_prompts.clear()
    second, _ = perform(fabric, tmp_path, "calm", run="second")  # with the first run's memory
    again = all_texts(fabric)

    assert leaks([*first.prompts, *first.forked, *rendered_first, *moved], may_have) == []
    assert (
        leaks([*second.prompts, *second.forked, *restarted, *rendered_prompts, *again], copied)
        == []
    )
    assert {entry.agent for entry in first.forked} == {ids["ada"], ids["bert"]}
    for found in (rendered_first, moved, rendered_prompts):
        assert findings(found, may_have) == word_holders(may_have)
    for found in (restarted, again):
        assert findings(found, copied) == word_holders(copied)
    places = {(entry.where.split()[0], entry.agent) for entry in restarted}
    all_agents = {*ids.values(), "copy"}
    assert places == {
        (kind, agent) for kind in ("record", "block", "memory") for agent in all_agents
    }


def test_leak_is_detected_without_visibility_check(fabric, tmp_path, monkeypatch, rendered_prompts):
    """Without one visibility check, private words are in prompts and on disks."""
    monkeypatch.setattr(Phase, "hears", lambda *_: True)
    speaker, ids = perform(fabric, tmp_path, "leaky")
    found = leaks([*speaker.prompts, *rendered_prompts, *all_texts(fabric)], allowed_holders(ids))
    for kind in ("prompt", "rendered prompt", "record", "block", "memory"):
        expected = f"{ids['bert']} has 'motto keeper number' in its {kind}"
        assert any(leak.startswith(expected) for leak in found), kind
