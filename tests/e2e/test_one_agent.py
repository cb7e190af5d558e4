"""A conversation stays one agent in every dialect while its client rewrites its history.

Clients change a clock in the system prompt, put a reminder into the newest message only, and omit
old tool results; of two nodes, the next turn reaches the one that has the agent.
"""

import itertools

import pytest

from fabric.turn.messages import MessageRole
from tests.support.agent_traffic import corpus, words
from tests.support.local_fabric import local_fabric
from tests.support.obedient_model import obedient
from tests.support.template_shapes import SHAPES, ScriptedAnswer, write_shape

SHAPE = SHAPES["thoughts_kept"]
KEYS = {"one": "key-of-tenant-number-one", "two": "key-of-tenant-number-two"}
GONE = "[Old tool result content cleared]"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TURNS = 4
_names = itertools.count()


def scripted_answer(request):
    """Call the tool if the user asks for it; otherwise answer with new text."""
    if not request.messages:  # a node's self-test
        return ScriptedAnswer(text="")
    last, count = request.messages[-1], len(request.messages)
    if last.role is MessageRole.USER and "look" in "".join(last.texts) and request.tools:
        return ScriptedAnswer(text="", call=("look", {"path": f"shelf {count}"}))
    return ScriptedAnswer(text=words(500 + count, 20))


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    model = str(write_shape(folder / "model", SHAPE, "full", corpus()))
    with (
        obedient(SHAPE, scripted_answer),
        local_fabric(folder, model, "left", "right", api_keys=KEYS) as instance,
    ):
        yield instance


class Client:
    """Client that keeps its history in one dialect, and rewrites it before each turn."""

    def __init__(self, fabric, dialect, tenant="one"):
        self.fabric, self.dialect, self.tenant = fabric, dialect, tenant
        self.topic = next(_names)  # distinct in each test
        self.system = f"It is 09:40. Keep archive {self.topic}. {words(self.topic, 250)}"
        self.history = []
        self.agents, self.nodes, self.reused = [], [], []

    def send(self, path, body):
        headers = {"authorization": f"Bearer {KEYS[self.tenant]}"}
        body = {"model": self.fabric.model_name, "temperature": 0, **body}
        answer = self.fabric.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        self.agents.append(answer.headers["x-macfabric-agent"])
        self.nodes.append(answer.headers["x-macfabric-node"])
        self.reused.append(int(answer.headers["x-macfabric-cached-tokens"]))
        return answer.json()

    def ask(self, text):
        self.history.append({"role": "user", "content": text})
        self.answer()

    def answer(self):
        getattr(self, self.dialect)()

    def chat(self):
        function = {"name": "look", "parameters": SCHEMA}
        system = {"role": "system", "content": self.system}
        body = {
            "messages": [system, *self.history],
            "tools": [{"type": "function", "function": function}],
        }
        message = self.send("/v1/chat/completions", body)["choices"][0]["message"]
        self.history.append({key: value for key, value in message.items() if value})

    def messages(self):
        body = {
            "system": [{"type": "text", "text": self.system}],
            "messages": self.history,
            "tools": [{"name": "look", "input_schema": SCHEMA}],
            "max_tokens": 200,
        }
        content = self.send("/v1/messages", body)["content"]
        self.history.append({"role": "assistant", "content": content})

    def responses(self):
        body = {
            "instructions": self.system,
            "input": self.history,
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "store": False,
        }
        self.history += self.send("/v1/responses", body)["output"]

    def give_result(self, text):
        """Append the result of the last call."""
        last = self.history[-1]
        if self.dialect == "chat":
            (call,) = last["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": text}
        elif self.dialect == "messages":
            (call,) = (block for block in last["content"] if block["type"] == "tool_use")
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
            result = {"role": "user", "content": [block]}
        else:
            result = {"type": "function_call_output", "call_id": last["call_id"], "output": text}
        self.history.append(result)
        self.answer()

    def elide_results(self):
        for item in self.history:
            if item.get("role") == "tool":
                item["content"] = GONE
            elif item.get("type") == "function_call_output":
                item["output"] = GONE
            elif isinstance(item.get("content"), list):
                for block in item["content"]:
                    if block["type"] == "tool_result":
                        block["content"] = GONE

    def rows(self):
        """Return the fabric's agents with this client's topic."""
        headers = {"authorization": f"Bearer {KEYS[self.tenant]}"}
        listed = self.fabric.http.get("/v1/agents", headers=headers).json()["data"]
        return [row for row in listed if row["id"] in self.agents]

    def all_names(self):
        headers = {"authorization": f"Bearer {KEYS[self.tenant]}"}
        listed = self.fabric.http.get("/v1/agents", headers=headers).json()["data"]
        return {row["id"] for row in listed}


def clock(client):
    system = client.system
    for turn in range(TURNS):
        client.system = f"It is Sat Nov 28 09:4{turn}:12 UTC 2026. {system}"
        client.ask(words(100 + turn, 80))


def reminder(client):
    for turn in range(TURNS):
        plain = words(100 + turn, 80)
        note = f"<system-reminder>\n{words(300 + turn, 30)}\n</system-reminder>"
        if client.dialect == "messages":  # as a block of its own, in front
            sent = [{"type": "text", "text": note}, {"type": "text", "text": plain}]
        else:
            sent = f"{plain}\n{note}"
        client.ask(sent)
        for item in client.history:
            if item.get("content") is sent:
                item["content"] = plain


def elided(client):
    for turn in range(TURNS // 2):
        client.ask(f"look {words(100 + turn, 80)}")
        client.give_result(words(200 + turn, 400))
        client.elide_results()


DIALECTS = ("chat", "messages", "responses")


@pytest.mark.parametrize("rewrite", [clock, reminder, elided], ids=lambda r: r.__name__)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_rewritten_history_stays_one_agent(fabric, dialect, rewrite):
    before = Client(fabric, dialect).all_names()
    client = Client(fabric, dialect)
    rewrite(client)
    assert len(client.agents) == TURNS
    assert len({*client.agents}) == len({*client.nodes}) == 1
    (row,) = client.rows()
    assert client.all_names() - before == {row["id"]}
    assert row["branches"] > 0
    assert row["revision"] == TURNS


def test_conversations_with_the_same_system_prompt_are_not_merged(fabric):
    one = Client(fabric, "chat")
    one.ask(words(1, 60))
    two = Client(fabric, "chat")
    two.system = one.system
    two.ask(words(2, 60))
    for client in (one, two):
        client.system = client.system.replace("09:40", "09:41")
        client.ask(words(3, 60))
    assert len({*one.agents}) == len({*two.agents}) == 1
    assert one.agents[0] != two.agents[0]


def test_two_users_with_the_same_first_question_are_not_merged(fabric):
    one, two = Client(fabric, "chat"), Client(fabric, "chat")
    system = one.system
    for minute, (client, text) in enumerate(
        [(one, "Hello?"), (two, "Hello?"), (one, "Who is it?"), (two, "Where is it?")] * 2
    ):
        client.system = system.replace("09:40", f"09:{41 + minute}")
        client.ask(f"{text} {minute // 4}")
    assert one.agents[1] != two.agents[1]
    assert not {*one.agents[1:]} & {*two.agents[1:]}
    assert len({*one.agents[1:]}) == len({*two.agents[1:]}) == 1


def test_conversations_of_tenants_are_never_merged(fabric):
    one, two = Client(fabric, "chat", "one"), Client(fabric, "chat", "two")
    one.ask("Hello?")
    two.system, two.history = one.system.replace("09:40", "09:41"), [*one.history]
    two.ask("And now?")
    assert two.agents[0] not in one.all_names()
    assert two.reused == [0]


def test_named_agent_is_not_continued_by_unnamed_conversation(fabric):
    client = Client(fabric, "chat")
    key = {"authorization": f"Bearer {KEYS['one']}", "x-agent-id": f"named-{client.topic}"}
    body = {
        "model": fabric.model_name,
        "messages": [
            {"role": "system", "content": client.system},
            {"role": "user", "content": "Hello?"},
        ],
    }
    answer = fabric.http.post("/v1/chat/completions", json=body, headers=key)
    text = answer.json()["choices"][0]["message"]["content"]
    client.history = [body["messages"][1], {"role": "assistant", "content": text}]
    client.system = client.system.replace("09:40", "09:41")
    client.ask("And now?")
    assert client.agents[0] != f"named-{client.topic}"


def test_migration_moves_current_form_and_drops_branches(fabric):
    client = Client(fabric, "chat")
    clock(client)
    (row,) = client.rows()
    assert row["branches"] > 0
    to = {"left": "right", "right": "left"}[row["owner"]]
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    moved = fabric.http.post(f"/v1/agents/{row['id']}/migrate", json={"to": to}, headers=headers)
    assert moved.status_code == 200, moved.text
    client.system = client.system.replace("09:4", "10:4")
    client.ask("And now?")
    assert (client.agents[-1], client.nodes[-1]) == (row["id"], to)
    assert len(client.rows()) == 1


def test_erasure_removes_all_branches(fabric):
    client = Client(fabric, "chat")
    clock(client)
    (row,) = client.rows()
    service = fabric.services[row["owner"]]
    agent = service.node.resources.table.get(("one", row["id"]))
    refs = {*agent.saved.kept_refs}
    assert len(refs) > len({*agent.saved.refs})
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    receipt = fabric.http.delete(f"/v1/agents/{row['id']}", headers=headers).json()
    assert receipt["blocks_removed"] == len(refs)
    assert not [ref for ref in refs if service.node.resources.store.blocks.has(ref)]
    client.ask("And now?")
    assert client.agents[-1] != row["id"]
    assert client.reused[-1] == 0


def test_restarted_router_finds_agent_by_its_form(fabric):
    client = Client(fabric, "chat")
    clock(client)
    fabric.restart_router()
    fabric.await_agents()
    client.system = client.system.replace("09:4", "11:4")
    client.ask("And now?")
    assert len({*client.agents}) == 1
