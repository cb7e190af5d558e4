"""Random requests of every operation of the OpenAPI document, sent to a real fabric and judged.

Most requests are valid by the document, the others are not; many name agents and nodes that
exist. Each operation gets an equal share of the cases. `send_turns` sends only turns, whose
bodies (`chat_bodies`) are mostly accepted.
"""

import random
import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks

from tests.support import chat_bodies
from tests.support.documented import DOCUMENT

# The fabric's threads draw random numbers while a case is drawn; they are not part of its strategy.
ALLOWS_RANDOM_THREADS = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)
JUDGES = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
AGENTS, NODES = ["mira", "ivan", "vera"], ["left", "right"]
OPEN = ("/health", "/healthz")
ENDLESS = "/v1/events"
TURNS = {
    "/v1/chat/completions": chat_bodies.chats,
    "/v1/messages": chat_bodies.messages,
    "/v1/responses": chat_bodies.responses,
}
BUSY, ATTEMPTS = (503, 529), 20
OWN_FAULT = re.compile(r'"type": ?"(server_error|api_error|overloaded_error)"')  # in a stream
EXCLUDED = ("/v1/nodes/{node}/drain",)  # draining would leave no node
TIMEOUT_S = 60
MESSAGES = [{"role": "user", "content": "The vault code of Mira is otter lantern quartz."}]
RUN = {"run": "cases", "yaml": "{scenario: s, agents: {a: {}}, phases: [{id: p, agents: [a]}]}"}
REQUIRED = ("model", "messages", "prompt", "input", "max_tokens", "to", "as", "pinned",
            "yaml")  # fmt: skip


@dataclass
class Judged:
    """Statuses and failures of the requests sent."""

    statuses: Counter = field(default_factory=Counter)  # by method, path and status
    wrong: dict[str, str] = field(default_factory=dict)  # how to repeat it, by its title
    retried: int = 0  # because no node was ready

    @property
    def count(self) -> int:
        return self.statuses.total()

    def print_statuses(self):
        for (method, path, status), times in sorted(self.statuses.items()):
            print(f"{times:6} {method} {path} {status}")

    def accepted(self, path: str) -> float:
        """Return the share of a path's cases that were answered 2xx."""
        of_path = [(status, n) for (_, each, status), n in self.statuses.items() if each == path]
        return sum(n for status, n in of_path if status < 300) / sum(n for _, n in of_path)


def operations():
    """List all operations of the document."""
    document = deepcopy(DOCUMENT)
    for path in document["paths"].values():
        for operation in path.values():
            del operation["security"]  # the test chooses the keys
    schema = schemathesis.openapi.from_dict(document)
    return [result.ok() for result in schema.get_all_operations()]


def send_cases(fabric, key, operator_key, count, seed):
    """Send `count` cases in total, equally many for each operation."""
    judged, found = Judged(), operations()
    with requests.Session() as session:
        sender = _Sender(fabric.url, fabric.model_name, key, operator_key, session, judged)
        for index, operation in enumerate(found):
            share = count // len(found) + (index < count % len(found))
            _run(operation, sender, share, seed + index)
    return judged


def send_turns(fabric, key, operator_key, count, seed):
    """Send `count` turns over all dialects; bodies are valid or changed in one or two places."""
    judged = Judged()
    with requests.Session() as session:
        sender = _Sender(fabric.url, fabric.model_name, key, operator_key, session, judged)
        for operation in operations():
            if operation.path in TURNS:
                bodies = chat_bodies.changed(TURNS[operation.path](fabric.model_name))
                cases = bodies.map(partial(_case, operation))
                _draw(cases, sender.send_turn, -(-count // len(TURNS)), seed)
    return judged


def _case(operation, body):
    return operation.Case(body=body, media_type="application/json", headers={})


def _run(operation, sender, count, seed):
    modes = schemathesis.GenerationMode
    right = max(1, count * 3 // 4)
    for mode, part in ((modes.POSITIVE, right), (modes.NEGATIVE, count - right)):
        done = 0
        while done < part:  # hypothesis ends early where few cases are possible
            before = sender.judged.count
            _generate(operation, mode, sender, part - done, seed + done)
            sent_count = sender.judged.count - before
            if not sent_count:
                if mode is modes.NEGATIVE:  # nothing to invalidate: send valid cases
                    _generate(operation, modes.POSITIVE, sender, part - done, seed + done)
                break
            done += sent_count


def _generate(operation, mode, sender, count, seed):
    _draw(operation.as_strategy(generation_mode=mode), sender.send, count, seed)


def _draw(cases, send, count, seed):
    """Send up to `count` cases of a strategy."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases)
    def each(case):
        send(case)

    try:
        each()
    except hypothesis.errors.Unsatisfiable:
        return


@dataclass
class _Sender:
    url: str
    model: str
    key: str
    operator_key: str
    session: requests.Session
    judged: Judged
    sent: int = 0
    agents: set[str] = field(default_factory=set)  # agents that exist
    waiting: Event = field(default_factory=Event)  # never set

    def send(self, case):
        """Send one case; every eighth also with a wrong key."""
        self.sent += 1
        choose = random.Random(self.sent)
        self._focus(case, choose)
        if self.sent % 8 == 0 and case.operation.path not in OPEN:
            self._refused(case, choose)
        headers = {"Authorization": f"Bearer {self.key}"}
        if choose.random() < 0.8:
            headers["X-Macfabric-Operator-Key"] = self.operator_key
        self._judge(case, headers)

    def send_turn(self, case):
        """Send one turn of a named or unnamed agent; retry while no node is ready.

        On a starved machine, nodes sometimes miss heartbeats; clients retry, too.
        """
        self.sent += 1
        headers = {"Authorization": f"Bearer {self.key}"}
        agent = random.Random(self.sent).choice([*AGENTS, None, None])
        if agent is not None:
            headers["X-Agent-ID"] = agent
        answer = self._judge(case, headers, ATTEMPTS)
        if answer is not None and OWN_FAULT.search(answer.text):
            self._note(f"{_name(case)} ends in an error of ours", case, answer)

    def _focus(self, case, choose):
        """Put names of existing agents, nodes and runs into most cases."""
        path, places = case.operation.path, case.path_parameters or {}
        if "agent" in places and choose.random() < 0.8:
            places["agent"] = choose.choice(AGENTS)
        if "node" in places and path not in EXCLUDED and choose.random() < 0.6:
            places["node"] = choose.choice(NODES)
        if "model" in places and choose.random() < 0.6:
            places["model"] = self.model
        if "response" in places and choose.random() < 0.6:
            body = {"model": self.model, "input": "hello", "max_output_tokens": 1}
            places["response"] = self._post("/v1/responses", json=body).json()["id"]
        if "run" in places and choose.random() < 0.8:
            places["run"] = self._post("/v1/scenarios", json=RUN).json()["id"]
        if path.startswith("/v1/agents/"):
            self._make(places["agent"])
        if path.endswith("/resume") and choose.random() < 0.6:
            self._make(AGENTS[0])
            case.body = self._post(f"/v1/agents/{AGENTS[0]}/hibernate").content
        if isinstance(case.body, dict):
            self._trim(case.body, choose)

    def _make(self, agent):
        """Create an agent unless it exists."""
        if agent in AGENTS and agent not in self.agents:
            body = {"model": self.model, "messages": MESSAGES, "max_tokens": 1}
            self._post("/v1/chat/completions", json=body, headers={"X-Agent-ID": agent})
            self.agents.add(agent)

    def _post(self, path, headers=None, **content):
        headers = {"Authorization": f"Bearer {self.key}"} | (headers or {})
        answer = self.session.post(self.url + path, headers=headers, timeout=TIMEOUT_S, **content)
        assert answer.ok, answer.text
        return answer

    def _trim(self, body, choose):
        """Remove most optional fields: bodies with all of them are nearly always refused."""
        for name in list(body):
            if name not in REQUIRED and choose.random() < 0.85:
                del body[name]
        if "messages" in body and choose.random() < 0.6:
            body["messages"] = MESSAGES
        if "model" in body and choose.random() < 0.9:
            body["model"] = self.model
        if "to" in body and choose.random() < 0.7:
            body["to"] = choose.choice(NODES)
        if "as" in body and choose.random() < 0.5:
            body["as"] = choose.choice(AGENTS)

    def _refused(self, case, choose):
        wrong = "".join(choose.choices("abcdefghij", k=24))
        answer = self._call(case, {"Authorization": f"Bearer {wrong}"})
        if answer is not None and answer.status_code != 401:
            self._note(f"{_name(case)} takes a wrong key: {answer.status_code}", case, answer)

    def _judge(self, case, headers, attempts=1):
        answer = self._call(case, headers)
        while answer is not None and answer.status_code in BUSY and attempts > 1:
            self.judged.retried += 1
            self.waiting.wait(float(answer.headers["retry-after"][0]))
            answer, attempts = self._call(case, headers), attempts - 1
        if answer is None:
            return None
        self.judged.statuses[case.method, case.operation.path, answer.status_code] += 1
        if case.method == "DELETE" and answer.status_code == 200:
            self.agents.discard(case.path_parameters.get("agent"))
        try:
            case.validate_response(answer, checks=JUDGES)
        except (Failure, FailureGroup) as failure:
            for each in getattr(failure, "exceptions", [failure]):
                what = f"{_name(case)} {answer.status_code}: {each.title}"
                self._note(what, case, answer, str(each.message)[:400])
        return answer

    def _call(self, case, headers):
        try:
            if case.operation.path == ENDLESS:
                case.method = "HEAD"  # the stream never ends: request its headers only
            return case.call(
                base_url=self.url, session=self.session, headers=headers, timeout=TIMEOUT_S
            )
        except requests.exceptions.InvalidHeader:
            return None  # no client could send it
        except (requests.RequestException, UnicodeError) as error:
            self._note(f"{_name(case)}: {type(error).__name__}", case, None, str(error)[:400])
            return None

    def _note(self, what, case, answer, why=""):
        if what not in self.judged.wrong:
            excerpt = answer.text[:400] if answer is not None else ""
            self.judged.wrong[what] = f"{why}\n{excerpt}\n{case.as_curl_command()[:1500]}"


def _name(case):
    return f"{case.operation.method.upper()} {case.operation.path}"
