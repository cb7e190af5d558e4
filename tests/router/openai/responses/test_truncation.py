"""`truncation: auto` drops the oldest turns; `disabled` refuses."""

import pytest

from fabric.turn.messages import MessageRole
from tests.router.counting_node import CountingNode, chars_of
from tests.router.fake_node import MODEL
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
CONTEXT = 4_000
HEADER = "x-macfabric-policies"


def said(turns, chars=100):
    items = [{"role": "developer", "content": "be brief"}]
    for n in range(turns):
        items += [
            {"role": "user", "content": f"{n:04}" + "u" * (chars - 4)},
            {"role": "assistant", "content": "a" * chars},
        ]
    return [*items, {"role": "user", "content": "and now?"}]


async def ask(made, items, **more):
    body = {"model": MODEL, "input": items, "truncation": "auto", **more}
    return await made.http().post("/v1/responses", json=body)


def node():
    made = CountingNode("node-a")
    made.view_changes["context_tokens_max"] = CONTEXT
    return made


async def test_the_oldest_turns_go_until_the_rest_fits_with_room_for_the_answer():
    a = node()
    async with rig(nodes=[a]) as made:
        answer = await ask(made, said(50))

    messages = a.requests[0].messages
    dropped = 102 - len(messages)
    assert answer.json()["truncation"] == "auto"
    assert answer.headers[HEADER] == f"truncation={dropped}"
    assert "x-macfabric-ignored" not in answer.headers
    assert messages[0].role is MessageRole.SYSTEM
    assert messages[1].texts[0].startswith(f"{dropped // 2:04}"), "it begins with a turn"
    assert messages[-1].texts == ("and now?",)
    assert CONTEXT // 2 < sum(map(chars_of, messages)) <= CONTEXT * 3 // 4
    assert len(a.counted) <= 5


async def test_less_is_dropped_for_a_short_answer():
    a = node()
    async with rig(nodes=[a]) as made:
        await ask(made, said(50), max_output_tokens=1)
    assert CONTEXT * 3 // 4 < sum(map(chars_of, a.requests[0].messages)) < CONTEXT


async def test_what_fits_is_left_alone_and_what_is_short_is_not_counted():
    a = node()
    async with rig(nodes=[a]) as made:
        await ask(made, said(19))
        counted = len(a.counted)
        a.view_changes["context_tokens_max"] = 1 << 20
        await made.fleet.membership.refresh()
        answer = await ask(made, said(19))

    assert [len(request.messages) for request in a.requests] == [40, 40]
    assert (counted, len(a.counted)) == (1, 1)
    assert answer.headers[HEADER] == "truncation=0"


async def test_growing_conversations_begin_alike_for_many_turns():
    a = node()
    async with rig(nodes=[a]) as made:
        for turns in range(40, 80):
            await ask(made, said(turns))
    begins = [request.messages[1].texts[0][:4] for request in a.requests]

    assert begins == sorted(begins)
    assert len(set(begins)) <= 8, "40 turns of 200 tokens, of which 500 go at a time"


async def test_a_long_loop_of_tools_loses_its_oldest_steps():
    a = node()
    items = [{"role": "user", "content": "go"}]
    for n in range(40):
        call = {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": "{}"}
        items += [
            call,
            {"type": "function_call_output", "call_id": f"c{n}", "output": "r" * 200},
        ]
    async with rig(nodes=[a]) as made:
        answer = await ask(made, items)

    messages = a.requests[0].messages
    assert answer.status_code == 200
    assert messages[0].texts == ("go",)
    ids = [use.id for message in messages for use in message.uses]
    assert ids == [message.result_of for message in messages if message.result_of]
    assert ids[-1] == "c39"
    assert sum(map(chars_of, messages)) <= CONTEXT * 3 // 4


async def test_what_cannot_be_made_to_fit_is_left_to_be_refused():
    a = node()
    async with rig(nodes=[a]) as made:
        answer = await ask(made, [*said(3), {"role": "user", "content": "x" * 9_000}])
    assert len(a.requests[0].messages) == len(said(3))
    assert answer.headers[HEADER] == "truncation=0"


async def test_without_it_nothing_is_dropped():
    a = node()
    async with rig(nodes=[a]) as made:
        answer = await ask(made, said(50), truncation="disabled")
    assert len(a.requests[0].messages) == 102
    assert HEADER not in answer.headers


async def test_what_is_stored_is_what_was_said():
    a = node()
    async with rig(nodes=[a]) as made:
        first = (await ask(made, said(50))).json()
        await ask(made, "more", previous_response_id=first["id"], truncation="disabled")
    assert len(a.requests[1].messages) == 104
