"""`truncation: auto` drops the oldest turns; `disabled` refuses."""

import pytest

from fabric.turn.messages import MessageRole
from tests.router.counting_node import CountingNode, chars_of
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
CONTEXT = 4_000
HEADER = "x-macfabric-policies"


def turn_items(turns, chars=100):
    items = [{"role": "developer", "content": "be brief"}]
    for n in range(turns):
        items += [
            {"role": "user", "content": f"{n:04}" + "u" * (chars - 4)},
            {"role": "assistant", "content": "a" * chars},
        ]
    return [*items, {"role": "user", "content": "and now?"}]


async def ask(fabric, items, **more):
    body = {"model": MODEL, "input": items, "truncation": "auto", **more}
    return await fabric.http().post("/v1/responses", json=body)


def node():
    fake = CountingNode("node-a")
    fake.view_changes["context_tokens_max"] = CONTEXT
    return fake


async def test_oldest_turns_are_dropped_until_prompt_and_answer_fit():
    a = node()
    async with rig(nodes=[a]) as fabric:
        answer = await ask(fabric, turn_items(50))

    messages = a.requests[0].messages
    dropped = 102 - len(messages)
    assert answer.json()["truncation"] == "auto"
    assert answer.headers[HEADER] == f"truncation={dropped}"
    assert "x-macfabric-ignored" not in answer.headers
    assert messages[0].role is MessageRole.SYSTEM
    assert messages[1].texts[0].startswith(f"{dropped // 2:04}"), "the cut is at a turn's start"
    assert messages[-1].texts == ("and now?",)
    assert CONTEXT // 2 < sum(map(chars_of, messages)) <= CONTEXT * 3 // 4
    assert len(a.counted) <= 5


async def test_fewer_turns_are_dropped_for_a_short_answer():
    a = node()
    async with rig(nodes=[a]) as fabric:
        await ask(fabric, turn_items(50), max_output_tokens=1)
    assert CONTEXT * 3 // 4 < sum(map(chars_of, a.requests[0].messages)) < CONTEXT


async def test_fitting_prompt_is_unchanged_and_short_one_is_not_counted():
    a = node()
    async with rig(nodes=[a]) as fabric:
        await ask(fabric, turn_items(19))
        counted = len(a.counted)
        a.view_changes["context_tokens_max"] = 1 << 20
        await fabric.fleet.membership.refresh()
        answer = await ask(fabric, turn_items(19))

    assert [len(request.messages) for request in a.requests] == [40, 40]
    assert (counted, len(a.counted)) == (1, 1)
    assert answer.headers[HEADER] == "truncation=0"


async def test_growing_conversation_is_cut_rarely_so_its_prefix_stays_cached():
    a = node()
    async with rig(nodes=[a]) as fabric:
        for turns in range(40, 80):
            await ask(fabric, turn_items(turns))
    begins = [request.messages[1].texts[0][:4] for request in a.requests]

    assert begins == sorted(begins)
    assert len(set(begins)) <= 8, "40 turns of 200 tokens, of which 500 go at a time"


async def test_long_tool_loop_drops_oldest_steps():
    a = node()
    items = [{"role": "user", "content": "go"}]
    for n in range(40):
        call = {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": "{}"}
        items += [
            call,
            {"type": "function_call_output", "call_id": f"c{n}", "output": "r" * 200},
        ]
    async with rig(nodes=[a]) as fabric:
        answer = await ask(fabric, items)

    messages = a.requests[0].messages
    assert answer.status_code == 200
    assert messages[0].texts == ("go",)
    ids = [use.id for message in messages for use in message.uses]
    assert ids == [message.result_of for message in messages if message.result_of]
    assert ids[-1] == "c39"
    assert sum(map(chars_of, messages)) <= CONTEXT * 3 // 4


async def test_prompt_that_cannot_fit_is_not_truncated():
    a = node()
    async with rig(nodes=[a]) as fabric:
        answer = await ask(fabric, [*turn_items(3), {"role": "user", "content": "x" * 9_000}])
    assert len(a.requests[0].messages) == len(turn_items(3))
    assert answer.headers[HEADER] == "truncation=0"


async def test_truncation_disabled_drops_nothing():
    a = node()
    async with rig(nodes=[a]) as fabric:
        answer = await ask(fabric, turn_items(50), truncation="disabled")
    assert len(a.requests[0].messages) == 102
    assert HEADER not in answer.headers


async def test_stored_response_keeps_untruncated_conversation():
    a = node()
    async with rig(nodes=[a]) as fabric:
        first = (await ask(fabric, turn_items(50))).json()
        await ask(fabric, "more", previous_response_id=first["id"], truncation="disabled")
    assert len(a.requests[1].messages) == 104
