"""Request bodies: the bytes that one tenant may hold, slow uploads, and the pace of whole ones."""

import asyncio
import json

import pytest

from fabric.limits import BODY_BYTES_MAX, MIB
from fabric.settings import RouterSettings
from fabric.turn.generation import Finished, FinishReason
from router.http.body_limit import RoundPacer
from router.limits import BODIES_ARRIVING_BYTES_MAX
from tests.router.fake_node import MODEL
from tests.router.rig import KEY, OTHER_KEY, rig, until

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=0.3
)
PER_ROUND = 4
LONG = "x" * (2 * MIB)
SILENT = (Finished(FinishReason.STOP, 0),)  # otherwise the fake echoes the body in one event
BEGUN_FILE = b"MFHIBER1\x01\0\0\0\xe6\0\0\0"  # whose header has 230 bytes
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x " * 400}]}


async def open_body(fabric, key, size_bytes, sent, path="/v1/chat/completions"):
    """Send a request head and the beginning of a body, and nothing more."""
    host, port = fabric.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fabric.writers.append(writer)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    head = "\r\n".join([*lines, f"content-length: {size_bytes}", "", ""])
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def status_of(reader):
    async with asyncio.timeout(60):
        line = await reader.readline()
    return int(line.split()[1]) if line else None


async def error_of(reader):
    status = await status_of(reader)
    async with asyncio.timeout(60):
        while (line := await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split()[1])
        return status, json.loads(await reader.readexactly(size))["error"]


async def test_unfinished_bodies_of_one_tenant_leave_room_for_others():
    opening = b'{"x": "' + b"," * (16 * MIB)
    async with rig("a", settings=TENANTS) as fabric:
        fabric["node-a"].behaviour.events = SILENT
        held = [await open_body(fabric, KEY, BODY_BYTES_MAX, opening) for _ in range(8)]
        waiting = {asyncio.create_task(status_of(reader)) for reader, _ in held}
        refused = set()
        async with asyncio.timeout(60):
            while len(waiting) * 16 * MIB > BODIES_ARRIVING_BYTES_MAX // 2:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
        small = await fabric.chat("hello", http=fabric.http(KEY))
        theirs = await fabric.chat(LONG, http=fabric.http(OTHER_KEY))
        for task in waiting:
            task.cancel()
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(60):  # room of closed connections is freed with a delay
            while (await fabric.chat(LONG, http=fabric.http(KEY))).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    assert {task.result() for task in refused} == {429}
    assert len(waiting) > 0
    assert small.status_code in {200, 429}
    assert theirs.status_code == 200


async def test_slow_uploads_get_408(monkeypatch):
    monkeypatch.setattr("router.http.body_limit.BODY_GRACE_S", 0.3)
    monkeypatch.setattr("router.http.body_limit.HIBERNATION_GRACE_S", 0.3)
    async with rig("a", settings=TENANTS) as fabric:
        opened = [
            await open_body(fabric, KEY, 1000, b"{"),
            await open_body(fabric, KEY, 1000, BEGUN_FILE, "/v1/agents/a/resume"),
        ]

        async def drip(writer):
            for _ in range(100):
                writer.write(b" ")
                await asyncio.sleep(0.05)

        drips = [asyncio.create_task(drip(writer)) for _, writer in opened]
        errors = [await error_of(reader) for reader, _ in opened]
        for task in drips:
            task.cancel()
        await asyncio.gather(*drips, return_exceptions=True)
        for _, writer in opened:
            writer.close()
        whole = await fabric.chat("hello", http=fabric.http(KEY))

    assert [status for status, _ in errors] == [408, 408]
    assert {error["code"] for _, error in errors} == {"upload_stalled"}
    assert whole.status_code == 200


async def test_bodies_without_valid_key_are_not_read():
    async with rig("a", settings=TENANTS) as fabric:
        opened = [await open_body(fabric, "wrong", BODY_BYTES_MAX, b"x" * 4096) for _ in range(20)]
        statuses = [await status_of(reader) for reader, _ in opened]
        for _, writer in opened:
            writer.close()

    assert statuses == [401] * 20


async def test_concurrent_requests_of_one_tenant_leave_room_for_others(monkeypatch):
    monkeypatch.setattr("router.http.body_limit.REQUESTS_MAX", 8)
    async with rig("a", settings=TENANTS) as fabric:
        fabric["node-a"].behaviour.delay_s = 0.02
        one, two = fabric.http(KEY), fabric.http(OTHER_KEY)
        many = [asyncio.create_task(one.post("/v1/chat/completions", json=CHAT)) for _ in range(8)]
        await until(lambda: fabric["node-a"].running == sum(not task.done() for task in many) == 4)
        other_request = asyncio.create_task(two.post("/v1/chat/completions", json=CHAT))
        await until(lambda: fabric["node-a"].running == 5)
        fabric["node-a"].behaviour.delay_s = 0.0
        theirs = await other_request
        statuses = [(await task).status_code for task in many]
        later = await one.post("/v1/chat/completions", json=CHAT)

    assert theirs.status_code == later.status_code == 200
    assert sorted(statuses) == [200] * 4 + [429] * 4


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"x":[' + b"[]," * (2 * MIB) + b"0]}", 413, "too_many_values"),
        (b"[" * (4 * MIB), 413, "too_many_values"),
        (b'{"model":"m","messages":[' + b'{"role":"user"},' * 200_001, 413, "too_many_values"),
        (
            b'{"model":"m","messages":[{"role":"assistant","tool_calls":[{"type":"function",'
            b'"function":{"name":"f","arguments":"{\\"a\\":[' + b"[]," * (1 * MIB) + b'0]}"}}]}]}',
            413,
            "too_many_values",
        ),
        (b'{"model":"m","messages":' + b'[{"role":"user","content":"a"}' + b', {"role":"user",'
         b'"content":"a"}' * 10_000 + b"]}", 400, "invalid_value"),
        (b'{"model":"m","x":' + b" " * MIB + b"9" * 4000 + b"}", 400, "invalid_json"),
        (json.dumps(CHAT).encode("utf-16"), 400, "invalid_json"),
    ],
    ids=["arrays", "depth", "messages", "arguments", "10,001 messages", "integer", "utf-16"],
)  # fmt: skip
async def test_hostile_json_is_rejected(body, status, code):
    async with rig("a") as fabric:
        response = await fabric.http().post("/v1/chat/completions", content=body)

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_prompt_of_32_mib_of_punctuation_reaches_node():
    text = ",[{" * (BODY_BYTES_MAX // 3 - 100)
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.events = SILENT
        answer = await fabric.chat(text, max_tokens=1)

    assert answer.status_code == 200, answer.text[:300]
    assert fabric["node-a"].requests[-1].messages[0].texts == (text,)


async def test_few_requests_pass_in_a_round_however_many_come():
    pacer, rounds, passed = RoundPacer(PER_ROUND), [0], []

    async def pass_one(number):
        await pacer.wait("a")
        passed.append(rounds[0])

    tasks = [asyncio.create_task(pass_one(number)) for number in range(50)]
    while not all(task.done() for task in tasks):
        rounds[0] += 1
        await asyncio.sleep(0)
    assert max(passed.count(number) for number in passed) <= PER_ROUND
    assert len(passed) == 50


async def test_an_owner_does_not_wait_for_the_flood_of_another():
    pacer, passed = RoundPacer(PER_ROUND), []

    async def pass_one(owner):
        await pacer.wait(owner)
        passed.append(owner)

    tasks = [asyncio.create_task(pass_one("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(pass_one("other")))
    await asyncio.gather(*tasks)
    assert passed.index("other") <= 3 * PER_ROUND


async def test_cancelled_requests_do_not_hold_up_others():
    pacer = RoundPacer(PER_ROUND)
    tasks = [asyncio.create_task(pacer.wait("a")) for _ in range(40)]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(result is None for result in results) >= 20
    await asyncio.wait_for(pacer.wait("a"), 60)
