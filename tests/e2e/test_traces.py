"""Spans of a real fabric's turns and moves, as a collector receives them."""

import sys
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest

from fabric.errors import FatalError
from fabric.hosting.limits import SPAN_TEXT_CHARS_MAX, SPANS_QUEUED_MAX
from fabric.hosting.tracing import begin_span, begin_tracing, end_tracing, is_tracing, span
from fabric.settings import TracingSettings
from tests.support.local_fabric import OPERATOR_KEY, LocalFabric, local_fabric
from tests.support.logged_turns import logged_turns
from tests.support.otlp_receiver import collector
from tests.support.tiny_models import ONE_LAYER, write_model

TENANT, KEY = "tenant-of-the-tests", "key-of-the-tenant-of-tests"
SECRET = "the vault of Mira holds a saffron umbrella. " * 30
CLIENT = "00-" + "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    model = str(write_model(folder / "model", ONE_LAYER))
    with local_fabric(folder, model, "node-a", "node-b", api_keys={TENANT: KEY}) as instance:
        yield instance


@contextmanager
def traced(endpoint, **settings):
    """Send the spans of this process to a collector, the last ones at the end of the block."""
    begin_tracing(TracingSettings(endpoint, **settings), "tests")
    try:
        yield
    finally:
        end_tracing()


def chat(fabric: LocalFabric, turn: str, agent: str, text: str = SECRET, **headers: str) -> str:
    """Take one turn; return its node."""
    body = {
        "model": fabric.model_name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
    }
    named = {"authorization": f"Bearer {KEY}", "x-agent-id": agent, "x-request-id": turn}
    answer = fabric.http.post("/v1/chat/completions", json=body, headers=named | headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-macfabric-node"]


def wait_for(condition):
    """Poll until a condition holds."""
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.1)
    pytest.fail("it never happened")


def parts(received, span):
    return {part.name for part in received.parts_of(span)}


def test_spans_of_a_turn_follow_it_from_its_client_to_its_node(fabric):
    with collector() as received, traced(received.url):
        node = chat(fabric, "turn-of-a-client", "cold", traceparent=f"{CLIENT}01")
        end_tracing()
        (turn,), (serve,) = received.named("turn"), received.named("serve")

    assert (turn.trace, turn.parent) == (CLIENT[3:35], CLIENT[36:52])
    assert parts(received, turn) == {"placement", "queue", "serve"}
    assert {"prepare", "prefill", "decode"} <= parts(received, serve)
    assert {each.trace for each in received.spans} == {turn.trace}
    assert serve.attributes["macfabric.node"] == turn.attributes["macfabric.node"] == node
    for each in (turn, serve):
        assert each.attributes["macfabric.turn"] == "turn-of-a-client"
        assert not each.failed
    assert turn.attributes["macfabric.outcome"] == "ok"
    assert turn.attributes["macfabric.completion_tokens"] == 12
    assert {
        *("tenant", "model", "priority", "agent", "epoch", "cache", "match", "prompt_tokens"),
        *("cached_tokens", "first_token_s"),
    } <= {name.removeprefix("macfabric.") for name in turn.attributes}
    assert received.resources[0]["service.name"] == "macfabric"
    assert received.resources[0]["service.instance.id"] == "tests"
    ordered = sorted(received.parts_of(serve), key=lambda part: part.start_ns)
    for before, after in pairwise(ordered):
        assert before.end_ns <= after.start_ns + 1000  # parts do not overlap, except by rounding
    assert all(turn.start_ns <= each.start_ns for each in ordered)


def test_turn_that_is_loaded_from_disk_has_a_part_for_it(fabric):
    chat(fabric, "turn-before-it", "warm")
    fabric.drop_hot()
    with collector() as received, traced(received.url):
        chat(fabric, "turn-from-disk", "warm")
        end_tracing()
        (turn,), (serve,) = received.named("turn"), received.named("serve")
    assert turn.parent == ""
    assert turn.attributes["macfabric.cache"] == "disk"
    reused = turn.attributes["macfabric.cached_tokens"]
    assert 0 < reused < turn.attributes["macfabric.prompt_tokens"]
    assert "load" in parts(received, serve)


def test_spans_of_a_move_name_the_steps_of_both_nodes(fabric):
    home = chat(fabric, "turn-before-move", "mover")
    other = "node-b" if home == "node-a" else "node-a"
    with collector() as received, traced(received.url):
        answer = fabric.http.post(
            "/v1/agents/mover/migrate",
            json={"to": other},
            headers={"authorization": f"Bearer {KEY}", "x-request-id": "request-to-move"},
        )
        assert answer.status_code == 200, answer.text
        end_tracing()
    (move,) = received.named("move")
    calls = {"offer_migration", "copy_blocks", "seal_agent", "commit_migration"}
    assert calls <= parts(received, move)
    (copied,) = received.named("copy_blocks")
    (fetch, *_) = received.parts_of(copied)
    assert (fetch.name, fetch.attributes["macfabric.source"]) == ("fetch", home)
    assert fetch.attributes["macfabric.bytes"] > 0
    assert {each.attributes["macfabric.turn"] for each in received.spans} == {"request-to-move"}


def test_spans_have_no_text_no_key_and_no_name_of_a_tenant(fabric):
    with collector() as received, traced(received.url):
        chat(fabric, "turn-with-secrets", "agent-with-a-name")
        chat(fabric, "turn-that-continues", "agent-with-a-name", SECRET + "And where?")
        end_tracing()
    sent = b"".join(received.bodies)
    secrets = ("saffron", "umbrella", TENANT, KEY, OPERATOR_KEY, "agent-with-a-name", "And where")
    assert [secret for secret in secrets if secret.encode() in sent] == []
    assert len({turn.attributes["macfabric.tenant"] for turn in received.named("turn")}) == 1


@pytest.mark.parametrize(
    ("settings", "headers"),
    [({}, {"traceparent": f"{CLIENT}00"}), ({"sample_ratio": 0.0}, {})],
    ids=["by its client", "by the settings"],
)
def test_turn_that_is_not_sampled_has_no_span(fabric, settings, headers):
    with collector() as received, traced(received.url, **settings):
        chat(fabric, "turn-not-sampled", "quiet", **headers)
        end_tracing()
    assert received.named("turn") == []


@pytest.mark.parametrize(
    "wrong", ["", "00-x-y-01", f"{CLIENT}1", "ff" + f"{CLIENT}01"[2:], "x" * 300]
)
def test_invalid_traceparent_begins_a_trace(fabric, wrong):
    with collector() as received, traced(received.url):
        chat(fabric, "turn-with-a-header", "odd", traceparent=wrong)
        end_tracing()
        (turn,) = received.named("turn")
    assert turn.parent == ""


def test_refused_turn_ends_its_span_with_the_code(fabric):
    with collector() as received, traced(received.url):
        body = {"model": fabric.model_name, "prompt": [10**6], "max_tokens": 4}
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "turn-refused-by-node"}
        answer = fabric.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400
        end_tracing()
        (turn,) = received.named("turn")
    assert turn.failed
    assert turn.attributes["macfabric.failure"] == answer.json()["error"]["code"]


def test_turn_that_its_client_leaves_ends_its_span_as_failed(fabric):
    body = {
        "model": fabric.model_name,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4_000,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {KEY}", "x-agent-id": "leaver"}
    with collector() as received, traced(received.url):
        url = "/v1/chat/completions"
        with fabric.http.stream("POST", url, json=body, headers=headers) as answer:
            next(answer.iter_lines())
        wait_for(lambda: received.named("turn"))
        (turn,) = received.named("turn")
    assert turn.failed
    assert turn.attributes["macfabric.failure"] == turn.attributes["macfabric.outcome"] != "ok"


def test_long_attributes_are_cut(fabric):
    with collector() as received, traced(received.url):
        begin_span("long", text="x" * (SPAN_TEXT_CHARS_MAX + 1)).end()
        end_tracing()
        (span_with_text,) = received.named("long")
    assert span_with_text.attributes["macfabric.text"] == "x" * SPAN_TEXT_CHARS_MAX


def test_collector_that_hangs_delays_no_turn(fabric):
    with collector(answers=False) as received:
        with traced(received.url):
            chat(fabric, "turn-before-it-hangs", "patient")
            assert received.arrived.wait(60)  # and does not answer
            chat(fabric, "turn-while-it-hangs", "patient")
            for _ in range(2 * SPANS_QUEUED_MAX):  # spans are dropped without an error
                begin_span("many").end()
        received.may_answer.set()
    assert not is_tracing()


def test_collector_that_is_gone_is_reported_once(fabric):
    with collector() as closed_collector:
        url = closed_collector.url
    with logged_turns("fabric.hosting.otel_spans") as lines, traced(url):
        chat(fabric, "turn-without-collector", "lonely")
        wait_for(lambda: any(url in message for message, _ in lines))
        chat(fabric, "turn-without-one-again", "lonely")
    assert [message for message, _ in lines if url in message] == [
        f"the collector at {url} does not accept spans: they are dropped"
    ]


def test_missing_packages_are_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(FatalError, match=r"pip install 'macfabric\[otel\]'"):
        begin_tracing(TracingSettings("http://127.0.0.1:1"), "tests")
    assert not is_tracing()


def test_without_an_endpoint_spans_are_nothing():
    begin_tracing(TracingSettings(), "tests")
    assert not is_tracing()
    with span("anything", node="node-a") as made:
        made.note(bytes=1)
        made.part("part", 0.0, 1.0)
    assert made.trace is None
