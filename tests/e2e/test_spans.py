"""Directives on messages by number, on texts and on tokens."""

import json

import httpx2
import pytest

from router.cli.main import main
from tests.support.local_fabric import local_fabric

KEY = "key-of-tenant-number-one"
FILL = "Nobody knows why the library has a second bridge near the old harbour market. " * 6
CODE, SHIP = "otter lantern quartz", "amber falcon comet"
HISTORY = [
    {"role": "system", "content": "You remember what you are told."},
    {"role": "user", "content": f"{FILL}The vault code of Mira is {CODE}. {FILL}"},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": f"{FILL}The ship name of Mira is {SHIP}."},
    {"role": "assistant", "content": "Noted."},
]
ASK_CODE = {"role": "user", "content": "The vault code of Mira is"}
ASK_SHIP = {"role": "user", "content": "The ship name of Mira is"}
START = HISTORY[1]["content"].index(CODE)
# Each selects the code; the last three select nothing else.
SPANS = {
    "message": {"message": 1},
    "messages": {"messages": {"first": 1, "last": 2}},
    "characters": {"message": 1, "start": START, "end": START + len(CODE)},
    "content": {"message": HISTORY[1], "start": START, "end": START + len(CODE)},
    "text": {"text": CODE, "message": 1},
}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right", api_keys={"one": KEY}) as instance:
        yield instance


def send(fabric, method, path, **body):
    headers = {"authorization": f"Bearer {KEY}"}
    payload = body if method == "POST" else None
    url = f"{fabric.url}/v1/agents/{path}"
    return httpx2.request(method, url, json=payload, headers=headers, timeout=120)


def direct(fabric, agent, *items, **more):
    answer = send(fabric, "POST", f"{agent}/directives", directives=list(items), **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(fabric, agent, messages):
    headers = {"authorization": f"Bearer {KEY}", "x-agent-id": agent}
    payload = {"model": "recall", "messages": messages, "temperature": 0, "max_tokens": 24}
    url = f"{fabric.url}/v1/chat/completions"
    answer = httpx2.post(url, json=payload, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def generate(fabric, agent, *messages):
    answer = send(
        fabric, "POST", f"{agent}/generate", messages=messages, temperature=0, max_tokens=24
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def memory(fabric, agent):
    return send(fabric, "GET", f"{agent}/directives").json()


@pytest.mark.parametrize("kind", SPANS)
def test_directed_span_stays_removed_when_resent(fabric, kind):
    agent = f"chat-{kind}"
    assert CODE in chat(fabric, agent, [*HISTORY, ASK_CODE])
    receipt = direct(fabric, agent, {**SPANS[kind], "replacement": "[gone]"}, operation="tidy-up-1")
    again = direct(fabric, agent, {**SPANS[kind], "replacement": "[gone]"}, operation="tidy-up-1")
    assert receipt["directives"] == again["directives"]
    assert CODE not in chat(fabric, agent, [*HISTORY, ASK_CODE])
    assert SHIP in chat(fabric, agent, [*HISTORY, ASK_SHIP])
    shown = memory(fabric, agent)
    assert all(each["is_applied"] for each in shown["directives"])
    first = shown["directives"][0]
    assert first["message"] == 1
    assert first["made_by"] == "one"
    assert len(first["dropped_digest"]) == 32
    whole = kind in ("message", "messages")
    assert first["dropped_chars"] == len(HISTORY[1]["content"]) if whole else len(CODE)
    assert CODE not in json.dumps(shown)
    send(fabric, "DELETE", f"{agent}/directives/tidy-up-1")
    assert CODE in chat(fabric, agent, [*HISTORY, ASK_CODE])
    undone = memory(fabric, agent)["undone"]
    assert undone
    assert all(each["undone_s"] >= each["made_s"] for each in undone)


@pytest.mark.parametrize("how", ["chat", "generate"])
def test_cache_between_two_edited_spans_is_kept(fabric, how):
    """The lines' positions follow from the directives, not from the lines themselves."""
    agent, line = f"repeated-{how}", "The harbour market is open.\n"
    history = [HISTORY[0], {"role": "user", "content": line * 60}, *HISTORY[2:]]
    chat(fabric, agent, [*history, ASK_SHIP])
    spans = [(len(line) * at, len(line) * (at + 1) - 1) for at in (5, 50)]
    direct(
        fabric,
        agent,
        *(
            {"message": 1, "start": start, "end": end, "replacement": "[cut]", "mode": "amortize"}
            for start, end in spans
        ),
    )
    if how == "chat":
        chat(fabric, agent, [*history, ASK_SHIP])
    else:
        generate(fabric, agent, {"role": "user", "content": "Go on."})
    row = send(fabric, "GET", agent).json()
    assert len(row["edits"]) == 2
    assert all(note["inserted_tokens"] < 20 for note in row["edits"])


def test_messages_are_listed_with_their_token_ranges(fabric):
    answer = chat(fabric, "listed", [*HISTORY, ASK_CODE])
    shown = memory(fabric, "listed")
    roles = [each["role"] for each in shown["messages"]]
    assert roles == [*(m["role"] for m in HISTORY), "user", "assistant"]
    contents = [*(m["content"] for m in HISTORY), ASK_CODE["content"], answer]
    assert [each["chars"] for each in shown["messages"]] == [len(text) for text in contents]
    ends = [(each["start_token"], each["end_token"]) for each in shown["messages"]]
    assert all(start < end for start, end in ends)
    assert ends == sorted(ends)


@pytest.mark.parametrize("mode", ["forget", "amortize"])
def test_directive_can_name_tokens_of_the_record(fabric, mode):
    agent = f"tokens-{mode}"
    chat(fabric, agent, [*HISTORY, ASK_CODE])
    place = memory(fabric, agent)["messages"][1]
    item = {"start_token": place["start_token"], "end_token": place["end_token"]}
    direct(fabric, agent, {**item, "replacement": "[gone]", "mode": mode})
    assert SHIP in chat(fabric, agent, [*HISTORY, ASK_SHIP])
    assert send(fabric, "GET", agent).json()["amortized"] == (mode == "amortize")
    assert CODE not in chat(fabric, agent, [*HISTORY, ASK_CODE])


@pytest.mark.parametrize("mode", ["forget", "amortize"])
def test_generate_only_agent_forgets_directed_text(fabric, mode):
    """This includes text added by `generate`, which belongs to no message."""
    agent = f"generate-{mode}"
    generate(fabric, agent, *HISTORY[:3], ASK_SHIP)
    generate(fabric, agent, HISTORY[3])
    assert CODE in generate(fabric, agent, ASK_CODE)["text"]
    receipt = direct(
        fabric, agent, {"text": CODE, "every": True, "replacement": "[x]", "mode": mode}
    )
    assert any(each["holds_for"] == ["generate"] for each in receipt["directives"])
    after = generate(fabric, agent, ASK_SHIP)
    assert SHIP in after["text"]
    row = send(fabric, "GET", agent).json()
    assert all(each["is_applied"] for each in row["directives"])
    assert row["amortized"] == (mode == "amortize")
    assert CODE not in generate(fabric, agent, ASK_CODE)["text"]
    owner = {"left": "right", "right": "left"}[row["owner"]]
    assert send(fabric, "POST", f"{agent}/migrate", to=owner).status_code == 200
    assert SHIP in generate(fabric, agent, ASK_SHIP)["text"]
    assert send(fabric, "GET", agent).json()["amortized"] == (mode == "amortize")


def test_rebuild_returns_agent_to_exact_memory(fabric, capsys):
    chat(fabric, "rebuilt", [*HISTORY, ASK_CODE])
    direct(
        fabric, "rebuilt", {"message": 1, "text": CODE, "replacement": "[x]", "mode": "amortize"}
    )
    chat(fabric, "rebuilt", [*HISTORY, ASK_SHIP])
    assert send(fabric, "GET", "rebuilt").json()["amortized"]
    common = ["--url", fabric.url, "--key", KEY]
    assert main(["rebuild", "rebuilt", *common]) == 0
    assert "next turn" in capsys.readouterr().out
    assert send(fabric, "GET", "rebuilt").json()["rebuilds"]
    assert SHIP in chat(fabric, "rebuilt", [*HISTORY, ASK_SHIP])
    row = send(fabric, "GET", "rebuilt").json()
    assert (row["rebuilds"], row["amortized"]) == (False, False)
    assert CODE not in chat(fabric, "rebuilt", [*HISTORY, ASK_CODE])


@pytest.mark.parametrize(
    ("items", "code", "param"),
    [
        ([{"message": 0}], "system_protected", "directives[0]"),
        ([{"messages": {"first": 0, "last": 1}}], "system_protected", "directives[0]"),
        ([{"message": 99}], "out_of_range", "directives[0]"),
        ([{"message": 1, "start": 4, "end": 99_999}], "out_of_range", "directives[0]"),
        ([{"message": 1}, {"text": CODE}], "overlapping_spans", "directives[1]"),
        ([{"text": "no such words"}], "text_not_found", "directives[0]"),
        ([{"text": "Noted."}], "text_ambiguous", "directives[0]"),
        ([{"text": "You remember"}], "text_not_found", "directives[0]"),
        ([{"start_token": 0, "end_token": 9_999}], "out_of_range", "directives[0]"),
        ([{"start_token": 0, "end_token": 2}], "span_cuts_template", "directives[0]"),
        ([{"start_token": 30}], "missing_required_parameter", "directives[0].end_token"),
        ([{"message": 1, "start_token": 3}], "invalid_value", "directives[0]"),
        ([{"messages": {"first": 3, "last": 1}}], "invalid_value", "directives[0].messages.last"),
        ([{"text": ""}], "invalid_value", "directives[0].text"),
        ([{"message": HISTORY[1], "end": 99_999}], "invalid_value", "directives[0].end"),
    ],
)
def test_invalid_spans_are_rejected_together(fabric, items, code, param):
    chat(fabric, "strict", [*HISTORY, ASK_SHIP])
    answer = send(fabric, "POST", "strict/directives", directives=[{"message": 2}, *items][-2:])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"].replace("directives[1]", "directives[0]") == param.replace("[1]", "[0]")
    assert send(fabric, "GET", "strict").json()["directives"] == []


def test_overlapping_second_operation_is_refused(fabric):
    chat(fabric, "twice", [*HISTORY, ASK_SHIP])
    direct(fabric, "twice", {"text": CODE, "replacement": "[x]"}, operation="operation-1")
    item = {"message": 1, "start": START + 3, "end": START + 9}
    answer = send(fabric, "POST", "twice/directives", directives=[item])
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "overlapping_spans"
    assert "operation-1" in answer.json()["error"]["message"]
    direct(fabric, "twice", {**item, "start": 0, "end": 9}, operation="operation-2")
    assert CODE not in chat(fabric, "twice", [*HISTORY, ASK_CODE])


def test_command_directs_spans_and_lists_messages(fabric, capsys):
    chat(fabric, "cli", [*HISTORY, ASK_CODE])
    common = ["--url", fabric.url, "--key", KEY]
    assert main(["direct", "cli", "--list", *common]) == 0
    assert "assistant" in capsys.readouterr().out
    span = ["--text", CODE, "--in", "1", "--message", "3", "--replacement", "[x]"]
    assert main(["direct", "cli", *span, "--json", *common]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert sorted(each["message"] for each in printed["directives"]) == [1, 3]
    assert CODE not in chat(fabric, "cli", [*HISTORY, ASK_CODE])
