"""Truncation of prompts over the context in every dialect, by option."""

from itertools import pairwise

import pytest

from fabric.errors import RejectedError
from fabric.settings import RouterSettings, parse_settings
from fabric.turn.messages import MessageRole
from tests.router.counting_node import CountingNode, chars_of
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
CONTEXT = 4_000
HEADER, REPORT = "x-macfabric-truncation", "x-macfabric-policies"
AUTO = {"macfabric": {"truncation": "auto"}}
WAYS = {"header": ({HEADER: "AUTO"}, {}), "field": ({}, AUTO)}


def node():
    fake = CountingNode("node-a")
    fake.view_changes["context_tokens_max"] = CONTEXT
    return fake


def turn_messages(turns):
    items = []
    for n in range(turns):
        items += [
            {"role": "user", "content": f"{n:04}" + "u" * 96},
            {"role": "assistant", "content": "a" * 100},
        ]
    return [*items, {"role": "user", "content": "and now?"}]


def chat(turns):
    return {
        "model": MODEL,
        "messages": [{"role": "system", "content": "be brief"}, *turn_messages(turns)],
    }


def messages(turns):
    return {
        "model": MODEL,
        "max_tokens": 100,
        "system": "be brief",
        "messages": turn_messages(turns),
    }


def responses(turns):
    return {"model": MODEL, "instructions": "be brief", "input": turn_messages(turns)}


DIALECTS = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", DIALECTS)
async def test_truncation_auto_drops_oldest_turns_in_each_dialect(path, way):
    a, (headers, fields) = node(), WAYS[way]
    async with rig(nodes=[a]) as fabric:
        body = {**DIALECTS[path](50), **fields}
        answer = await fabric.http().post(path, json=body, headers=headers)
        streamed = await fabric.http().post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    first, second = (request.messages for request in a.requests)
    assert first == second
    dropped = 102 - len(first)
    assert dropped > 0
    assert answer.headers[REPORT] == streamed.headers[REPORT] == f"truncation={dropped}"
    assert first[0].role is MessageRole.SYSTEM
    assert first[1].texts[0].startswith(f"{dropped // 2:04}")
    assert first[-1].texts == ("and now?",)
    assert sum(map(chars_of, first)) < CONTEXT


@pytest.mark.parametrize("path", DIALECTS)
async def test_truncation_is_off_by_default(path):
    a = node()
    async with rig(nodes=[a]) as fabric:
        answer = await fabric.http().post(path, json=DIALECTS[path](50))
    assert len(a.requests[0].messages) == 102
    assert not a.counted
    assert REPORT not in answer.headers


@pytest.mark.parametrize("path", DIALECTS)
async def test_request_overrides_default_truncation(path):
    a = node()
    async with rig(nodes=[a], settings=RouterSettings(truncation="auto")) as fabric:
        answer = await fabric.http().post(path, json=DIALECTS[path](50))
        off = {**DIALECTS[path](50), "macfabric": {"truncation": "disabled"}}
        await fabric.http().post(path, json=off)
    assert answer.headers[REPORT].startswith("truncation=")
    assert len(a.requests[0].messages) < 102
    assert len(a.requests[1].messages) == 102
    if path == "/v1/responses":
        assert answer.json()["truncation"] == "auto"


async def test_truncation_header_outranks_body_fields():
    a = node()
    async with rig(nodes=[a]) as fabric:
        body = {**responses(50), "truncation": "auto", **AUTO}
        await fabric.http().post("/v1/responses", json=body, headers={HEADER: "disabled"})
        await fabric.http().post("/v1/responses", json={**responses(50), "truncation": "auto"})
    assert len(a.requests[0].messages) == 102
    assert len(a.requests[1].messages) < 102


async def test_messages_api_reports_truncation_among_applied_edits():
    a = node()
    managed = {"context_management": {"edits": []}, **AUTO}
    async with rig(nodes=[a]) as fabric:
        answer = await fabric.http().post("/v1/messages", json={**messages(50), **managed})
    dropped = 102 - len(a.requests[0].messages)
    (applied,) = answer.json()["context_management"]["applied_edits"]
    assert applied["type"] == "truncation"
    assert applied["dropped_messages"] == dropped
    assert applied["cleared_input_tokens"] == dropped * 100


async def test_count_tokens_ignores_truncation_but_input_tokens_applies_it():
    async with rig(nodes=[node()], settings=RouterSettings(truncation="auto")) as fabric:
        paths = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/responses")
        bodies = ({**messages(50), **AUTO}, responses(50), responses(50))
        whole, read, response = [
            await fabric.http().post(path, json=body)
            for path, body in zip(paths, bodies, strict=True)
        ]
    assert whole.json()["input_tokens"] > CONTEXT
    assert REPORT not in whole.headers
    assert read.json()["input_tokens"] < CONTEXT
    assert read.headers[REPORT] == response.headers[REPORT] != "truncation=0"


@pytest.mark.parametrize("default", ["auto", "disabled"])
async def test_generate_rejects_truncation_and_is_never_truncated(default):
    a = node()
    async with rig(nodes=[a], settings=RouterSettings(truncation=default)) as fabric:
        path, body = "/v1/agents/mira/generate", {"model": MODEL, "text": "x" * 2 * CONTEXT}
        answer = await fabric.http().post(path, json={**body, **AUTO})
        plain = await fabric.http().post(path, json=body)
    assert answer.status_code == 400
    assert "directive" in answer.json()["error"]["message"]
    assert plain.status_code == 200
    assert a.requests[0].prompt == body["text"]
    assert REPORT not in plain.headers


LINES = "".join(f"{n:04}{'x' * 95}\n" for n in range(90))  # of a hundred characters each


async def complete(fabric, prompt, *, settings=AUTO, **more):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, **more}
    answer = await fabric.http().post("/v1/completions", json={**body, **settings})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("way", WAYS)
async def test_completion_prompt_is_cut_at_its_start(way):
    a, (headers, fields) = node(), WAYS[way]
    async with rig(nodes=[a]) as fabric:
        body = {"model": MODEL, "prompt": LINES, "max_tokens": 100, "echo": True, **fields}
        answer = await fabric.http().post("/v1/completions", json=body, headers=headers)
        short = await complete(fabric, LINES[:500])
        off = await complete(fabric, LINES, settings={})
    kept = a.requests[0].prompt
    dropped = len(LINES) - len(kept)
    assert 0 < len(kept) <= CONTEXT - 100
    assert LINES.endswith(kept)
    assert kept[:4].isdigit(), "the cut is at a line's start"
    assert a.requests[0].echo
    assert answer.headers[REPORT] == f"truncation={dropped}"
    assert (short.headers[REPORT], a.requests[1].prompt) == ("truncation=0", LINES[:500])
    assert (REPORT in off.headers, a.requests[2].prompt) == (False, LINES)


async def test_token_id_prompt_is_cut_at_its_start():
    a, ids = node(), list(range(9_000))
    async with rig(nodes=[a]) as fabric:
        answer = await complete(fabric, ids)
    kept = list(a.requests[0].prompt_ids)
    assert 0 < len(kept) <= CONTEXT - 100
    assert kept == ids[-len(kept) :]
    assert answer.headers[REPORT] == f"truncation={9_000 - len(kept)}"


async def test_each_of_several_prompts_is_cut_separately():
    a = node()
    async with rig(nodes=[a], settings=RouterSettings(truncation="auto")) as fabric:
        answer = await complete(fabric, [LINES, "hello", LINES[300:]], settings={}, n=2)
    short, *prompts = sorted({request.prompt for request in a.requests}, key=len)
    dropped = 2 * len(LINES) - 300 - sum(map(len, prompts))
    assert (short, len(prompts)) == ("hello", 2)
    assert all(len(prompt) <= CONTEXT - 100 for prompt in prompts)
    assert answer.headers[REPORT] == f"truncation={dropped}"
    assert len(answer.json()["choices"]) == 6


async def test_growing_prompt_is_cut_rarely_so_its_prefix_stays_cached():
    a, text = node(), ""
    async with rig(nodes=[a]) as fabric:
        for n in range(90):
            text += f"{n:04}" + "ü" * 95 + "\n"
            await complete(fabric, text, max_tokens=10)
    beginnings = [request.prompt[:4] for request in a.requests]
    cuts = sum(before != after for before, after in pairwise(beginnings))
    assert beginnings == sorted(beginnings)
    assert 3 <= cuts <= 90 * 100 // (CONTEXT // 2)
    assert all(len(request.prompt) < CONTEXT for request in a.requests)


@pytest.mark.parametrize("text", ["y" * 20_000, "\n" * 20_000, "🦊" * 9_000], ids=lambda t: t[0])
async def test_prompt_without_lines_is_cut_between_characters(text):
    a = node()
    async with rig(nodes=[a]) as fabric:
        await complete(fabric, text)
    assert 0 < len(a.requests[0].prompt) <= CONTEXT - 100


@pytest.mark.parametrize("path", DIALECTS)
async def test_unknown_truncation_value_is_rejected_in_each_dialect(path):
    async with rig("a") as fabric:
        wrong = {**DIALECTS[path](1), "macfabric": {"truncation": "some"}}
        by_field = await fabric.http().post(path, json=wrong)
        by_header = await fabric.http().post(path, json=DIALECTS[path](1), headers={HEADER: "some"})
    assert (by_field.status_code, by_header.status_code) == (400, 400)
    assert "macfabric.truncation" in by_field.text
    assert HEADER in by_header.text


def test_invalid_truncation_setting_is_named():
    with pytest.raises(RejectedError, match=r"router\.truncation"):
        parse_settings({"router": {"truncation": "always"}})
