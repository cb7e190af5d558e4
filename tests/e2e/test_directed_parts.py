"""Directives reach every part of a message: arguments, names and ids of calls, thoughts, texts."""

import json

import pytest

from tests.support.local_fabric import local_fabric

NOTES = "The library keeps a map of every bridge near the old harbour market. " * 8
SECRET, OTHER = "otter-lantern-quartz", "amber-falcon-comet"
CALL = {
    "id": "call_mine_1",
    "type": "function",
    "function": {
        "name": "store_note",
        "arguments": json.dumps(
            {"path": "/notes", "lines": [f"code {SECRET}", "end"], "pin": 4711}
        ),
    },
}
HISTORY = [
    {"role": "system", "content": "You remember what you are given."},
    {"role": "user", "content": f"Store it. {NOTES}"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_mine_1", "content": f"Stored {OTHER}. {NOTES}"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "I think of velvet-badger."},
    {"role": "user", "content": f"Thanks. {NOTES}"},
    {"role": "assistant", "content": "Welcome."},
]
ASK = {"role": "user", "content": "Go on."}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", encrypt_at_rest=False) as instance:
        instance.folder = folder
        yield instance


def chat(fabric, agent, messages=(*HISTORY, ASK), **more):
    body = {"model": "recall", "messages": list(messages), "temperature": 0, "max_tokens": 4}
    answer = fabric.http.post(
        "/v1/chat/completions", json={**body, **more}, headers={"x-agent-id": agent}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def direct(fabric, agent, *items, **more):
    body = {"directives": [{"mode": "forget", **item} for item in items], **more}
    return fabric.http.post(f"/v1/agents/{agent}/directives", json=body)


def record(fabric, agent):
    (service,) = fabric.services.values()
    return next(a.manifest for a in service.node.resources.table if a.manifest.agent == agent)


def on_disk(fabric, agent):
    """Return the bytes of the agent's record on disk."""
    records = (path.read_bytes() for path in fabric.folder.rglob("*.mf"))
    (raw,) = [each for each in records if agent.encode() in each]
    return raw


CASES = {
    "arguments by number": ({"message": 2}, SECRET),
    "arguments by number, replaced": ({"message": 2, "replacement": "[gone]"}, SECRET),
    "arguments by a range": ({"messages": {"first": 2, "last": 3}}, SECRET),
    "arguments by text": ({"text": SECRET, "replacement": "[gone]"}, SECRET),
    "arguments by text of a message": ({"message": 2, "text": SECRET}, SECRET),
    "a number in arguments": ({"text": "4711"}, "4711"),
    "arguments by the id of the call": (
        {"tool_call_id": "call_mine_1", "part": "arguments"},
        SECRET,
    ),
    "the name of a tool": ({"text": "store_note", "replacement": "a_tool"}, "store_note"),
    "the result by the id of the call": ({"tool_call_id": "call_mine_1"}, OTHER),
    "a text": ({"text": OTHER}, OTHER),
    "everything of a text": ({"text": NOTES.strip(), "every": True}, NOTES.strip()),
}


@pytest.mark.parametrize("mode", ["forget", "amortize"])
@pytest.mark.parametrize("case", CASES)
def test_directed_part_is_removed_from_prompt_and_record(fabric, case, mode):
    item, removed_text = CASES[case]
    agent = f"{case}-{mode}".replace(" ", "-").replace(",", "")
    chat(fabric, agent)
    assert removed_text in record(fabric, agent).text
    assert removed_text.encode() in on_disk(fabric, agent)
    receipt = direct(fabric, agent, {**item, "mode": mode})
    assert receipt.status_code == 200, receipt.text
    assert {each["is_applied"] for each in receipt.json()["directives"]} == {False}
    chat(fabric, agent)
    assert removed_text not in record(fabric, agent).text
    assert removed_text.encode() not in on_disk(fabric, agent)
    held = fabric.http.get(f"/v1/agents/{agent}").json()["directives"]
    assert {each["is_applied"] for each in held} == {True}
    assert all(each["dropped_chars"] for each in held)
    if "lines" in record(fabric, agent).text:  # only one value was removed
        assert "/notes" in record(fabric, agent).text
    for operation in {each["operation"] for each in held}:
        undone = fabric.http.delete(f"/v1/agents/{agent}/directives/{operation}")
        assert undone.json()["directives"] == []
    chat(fabric, agent)
    assert removed_text in record(fabric, agent).text


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"tool_call_id": "call_other"}, "call_not_found"),
        ({"tool_call_id": "call_other", "part": "arguments"}, "call_not_found"),
        ({"message": {"role": "user", "content": "never said"}}, "message_not_found"),
        ({"text": "never said"}, "text_not_found"),
        ({"message": 2, "text": "never said"}, "text_not_found"),
        ({"message": 99}, "out_of_range"),
    ],
)
def test_directive_matching_nothing_is_rejected(fabric, item, code):
    chat(fabric, "nothing")
    answer = direct(fabric, "nothing", item)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    both = direct(fabric, "nothing", {"text": SECRET}, item)
    assert both.status_code == 400
    assert fabric.http.get("/v1/agents/nothing").json()["directives"] == []


@pytest.mark.parametrize(
    "item",
    [
        {"tool_call_id": "call_mine_1", "part": "thoughts"},
        {"message": 2, "part": "arguments"},
        {"tool_call_id": "call_mine_1", "part": "arguments", "replacement": "no object"},
    ],
)
def test_directive_for_invalid_part_is_rejected(fabric, item):
    chat(fabric, "part")
    assert direct(fabric, "part", item).status_code == 400


def test_directive_for_empty_message_is_rejected(fabric):
    history = [*HISTORY[:4], {"role": "assistant", "content": ""}, HISTORY[5]]
    chat(fabric, "empty", history)
    for item in ({"message": 4}, {"messages": {"first": 4, "last": 4}}):
        answer = direct(fabric, "empty", item)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "nothing_to_edit"


def test_range_may_include_an_empty_message(fabric):
    history = [*HISTORY[:4], {"role": "assistant", "content": ""}, HISTORY[5]]
    chat(fabric, "range", history)
    assert direct(fabric, "range", {"messages": {"first": 3, "last": 4}}).status_code == 200


def test_arguments_can_be_replaced_by_an_object(fabric):
    chat(fabric, "replaced")
    item = {"tool_call_id": "call_mine_1", "part": "arguments", "replacement": '{"path": "/gone"}'}
    assert direct(fabric, "replaced", item).status_code == 200
    chat(fabric, "replaced")
    text = record(fabric, "replaced").text
    assert "/gone" in text
    assert SECRET not in text


def test_supersede_of_missing_call_is_rejected(fabric):
    chat(fabric, "superseded")
    for earlier, status in (("call_other", 400), ("call_mine_1", 200)):
        body = {"earlier": {"tool_call_id": earlier}, "later": {"message": 5}}
        answer = fabric.http.post("/v1/agents/superseded/supersede", json=body)
        assert answer.status_code == status


def test_two_directives_on_one_call_are_independent(fabric):
    chat(fabric, "two-texts")
    items = ({"text": SECRET, "replacement": "[a]"}, {"text": "/notes", "replacement": "[b]"})
    assert direct(fabric, "two-texts", *items).status_code == 200
    chat(fabric, "two-texts")
    text = record(fabric, "two-texts").text
    assert "[a]" in text
    assert "[b]" in text
    assert SECRET not in text
    assert "/notes" not in text


def test_directive_on_answer_survives_dropped_earlier_call(fabric):
    """Answers that only call have equal texts: they are matched by their calls."""
    failed = {**CALL, "id": "call_0", "function": {"name": "look", "arguments": "{}"}}
    early = [
        {"role": "assistant", "content": None, "tool_calls": [failed]},
        {"role": "tool", "tool_call_id": "call_0", "content": "Error: no"},
    ]
    chat(fabric, "shifted", [*HISTORY[:2], *early, *HISTORY[2:], ASK])
    assert direct(fabric, "shifted", {"message": 4}).status_code == 200
    chat(fabric, "shifted")
    assert SECRET not in record(fabric, "shifted").text


ARGUMENTS = {"path": "/notes", "lines": [f"code {SECRET}"]}
STORED = f"Stored. {NOTES}"
DIALECTS = {
    "messages": {
        "max_tokens": 4,
        "system": "You remember what you are given.",
        "messages": [
            {"role": "user", "content": f"Store it. {NOTES}"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "store_note", "input": ARGUMENTS},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": STORED},
                {"type": "text", "text": "Go on."},
            ]},
        ],
    },
    "responses": {
        "max_output_tokens": 16,
        "store": False,
        "instructions": "You remember what you are given.",
        "input": [
            {"role": "user", "content": f"Store it. {NOTES}"},
            {"type": "function_call", "call_id": "toolu_1", "name": "store_note",
             "arguments": json.dumps(ARGUMENTS)},
            {"type": "function_call_output", "call_id": "toolu_1", "output": STORED},
            {"role": "user", "content": "Go on."},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "item",
    [
        {"text": SECRET},
        {"message": 2},
        {"tool_call_id": "toolu_1", "part": "arguments"},
    ],
    ids=["text", "number", "call"],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_are_removed_in_every_dialect(fabric, dialect, item):
    agent = f"{dialect}-{'-'.join(item)}"
    for is_directed in (False, True):
        if is_directed:
            receipt = direct(fabric, agent, item)
            assert receipt.status_code == 200, receipt.text
        body = {"model": "recall", "temperature": 0, **DIALECTS[dialect]}
        answer = fabric.http.post(f"/v1/{dialect}", json=body, headers={"x-agent-id": agent})
        assert answer.status_code == 200, answer.text
        assert (SECRET in record(fabric, agent).text) != is_directed
        assert (SECRET.encode() in on_disk(fabric, agent)) != is_directed
