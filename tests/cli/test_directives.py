"""`macfabric direct` and `evict`: the request of each option."""

import pytest

from tests.cli.fake_fabric import ANSWERS

PATH = "/v1/agents/mira/directives"
ANSWER = {"id": "mira", "operation": "op-1", "directives": [], "undone": []}
EXACT = {"replacement": "[cleared]", "mode": "exact"}


@pytest.fixture
def ask(run, fabric, monkeypatch):
    """Run a command on mira; return its requests."""
    for method, path in (("POST", PATH), ("DELETE", PATH), ("DELETE", f"{PATH}/op-1")):
        monkeypatch.setitem(ANSWERS, (method, path), ANSWER)
    monkeypatch.setitem(ANSWERS, ("POST", "/v1/agents/mira/evict"), {"id": "mira"})

    def call(verb, *options):
        status, _, err = run(verb, "mira", *options, "--url", fabric.url)
        assert (status, err) == (0, "")
        return fabric.requests

    return call


@pytest.mark.parametrize(
    ("options", "directive"),
    [
        (["--result-of", "call_1"], {"tool_call_id": "call_1", **EXACT}),
        (
            ["--arguments-of", "call_1"],
            {"tool_call_id": "call_1", "part": "arguments", **EXACT, "replacement": None},
        ),
        (["--message", "3", "--drop"], {"message": 3, **EXACT, "replacement": None}),
        (["--messages", "2-4"], {"messages": {"first": 2, "last": 4}, **EXACT}),
        (
            ["--text", "vault", "--in", "2", "--every", "--replacement", "safe"],
            {"text": "vault", "message": 2, "every": True, **EXACT, "replacement": "safe"},
        ),
        (
            ["--tokens", "16-32", "--edits", "amortize"],
            {"start_token": 16, "end_token": 32, **EXACT, "mode": "amortize"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_part_becomes_one_directive(ask, options, directive):
    assert ask("direct", *options) == [("POST", PATH, {"directives": [directive]})]


@pytest.mark.parametrize(
    ("options", "path"), [(["--undo", "op-1"], f"{PATH}/op-1"), (["--undo-all"], PATH)]
)
def test_undo_names_one_operation_or_none(ask, options, path):
    assert ask("direct", *options) == [("DELETE", path, None)]


@pytest.mark.parametrize(
    ("options", "body"),
    [([], {}), (["--copy-on", "node-b"], {"from": "disk", "node": "node-b"})],
)
def test_evict_drops_the_copy_of_a_named_node(ask, options, body):
    assert ask("evict", *options) == [("POST", "/v1/agents/mira/evict", body)]
