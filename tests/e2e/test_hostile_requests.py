"""Hostile requests are refused at once, cost little, and disturb no other client.

During each of them, another tenant takes turns and a client without a key polls /healthz.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fabric.limits import BODY_BYTES_MAX, MIB
from tests.support.fabric_process import (
    BOB,
    GROWTH_BYTES_MAX,
    REFUSED_CPU_S_MAX,
    Attacked,
    allow_files,
    attacked,
    first_of,
    status_of,
    used,
)
from tests.support.samples import sample

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
IDLE = 4_150


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[Attacked]:
    with attacked(tmp_path_factory.mktemp("attacked")) as instance:
        yield instance


@pytest.fixture(scope="module")
def first_bytes(fabric):
    return used(fabric.pid)[1]


@pytest.fixture(autouse=True)
def _begin_attack(fabric, first_bytes):
    fabric.begin()


def head(path=CHAT, method="POST", *lines, key=BOB, host="127.0.0.1"):
    keyed = [f"authorization: Bearer {key}"] if key else []
    text = "\r\n".join([f"{method} {path} HTTP/1.1", f"host: {host}", *keyed, *lines, "", ""])
    return text.encode("latin-1")


def post(body: bytes, path=CHAT, key: str | None = BOB) -> bytes:
    return head(path, "POST", f"content-length: {len(body)}", key=key) + body


def chat(more: bytes) -> bytes:
    return post(b'{"model":"recall","max_tokens":2,' + more + b"}")


def message(fill: bytes) -> bytes:
    return b'"messages":[{"role":"user","content":"' + fill + b'"}]'


MANY = 31 * MIB
CALL = b'{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":"'
CHUNKED = head(CHAT, "POST", "transfer-encoding: chunked")
# Each request, and its allowed statuses; None: closed without an answer.
HOSTILE: dict[str, tuple[Callable[[], bytes], set[int | None]]] = {
    "a header of 20 MB": (lambda: b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000_000, {431, None}),
    "a header of 100 MiB": (lambda: b"GET / HTTP/1.1\r\nx: " + b"y" * (100 * MIB), {431, None}),
    "200,000 headers": (lambda: b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200_000, {431, None}),
    "a header name of 8 MB": (lambda: b"GET / HTTP/1.1\r\n" + b"y" * (8 * MIB), {400, 431, None}),
    "a URL of 8 MB": (lambda: b"GET /" + b"y" * (8 * MIB), {400, 414, 431, None}),
    "trailers without end": (lambda: CHUNKED + b"0\r\nx: " + b"y" * (8 * MIB), {431, None}),
    "a chunk extension": (lambda: CHUNKED + b"1;" + b"y" * (8 * MIB), {400, 431, None}),
    "31 MiB of arrays": (lambda: post(b'{"x":[' + b"[]," * (MANY // 3) + b"0]}"), {413}),
    "31 MiB of objects": (lambda: post(b'{"x":[' + b"{}," * (MANY // 3) + b"0]}"), {413}),
    "31 MiB of depth": (lambda: post(b"[" * MANY), {413}),
    "31 MiB of numbers": (lambda: post(b"[" + b"1," * (MANY // 2)), {413}),
    "31 MiB of quotes": (lambda: post(b'"' * MANY), {413}),
    "many keys": (lambda: post(b'{"x":{' + b'"":0,' * (MANY // 5) + b'"":1}}'), {413}),
    "long numbers": (lambda: post(b"[" + (b"9" * 4000 + b",") * (MANY // 4001) + b"1]"), {400}),
    "200,000 messages": (
        lambda: chat(b'"messages":[' + b'{"role":"user","content":"a"},' * 200_000 + b"{}]"),
        {413},
    ),
    "20,000 messages": (
        lambda: chat(b'"messages":[' + b'{"role":"user","content":"a"},' * 20_000 + b"{}]"),
        {400},
    ),
    "20,000 messages of some text": (
        lambda: chat(
            b'"messages":[' + b'{"role":"user","content":"%s"},' % (b"a " * 700) * 20_000 + b"{}]"
        ),
        {400},
    ),
    "arguments that are arrays": (
        lambda: chat(b'"messages":[' + CALL + b'{\\"a\\":[' + b"[]," * (10 * MIB) + b'0]}"}}]}]'),
        {413},
    ),
    "33 MiB": (lambda: post(b'{"x":"' + b"y" * (33 * MIB) + b'"}'), {413}),
    "chunks of 33 MiB": (
        lambda: CHUNKED + b"100000\r\n" + (b"y" * MIB + b"\r\n100000\r\n") * 33,
        {400, 413, None},
    ),
    "no key, 32 MiB": (lambda: post(b"[" * BODY_BYTES_MAX, key="wrong"), {401}),
    "UTF-16": (lambda: post('{"x": "\u2200"}'.encode("utf-16")), {400}),
    "Host: [": (lambda: head("/v1/models", "GET", key=None, host="["), {401}),
    "Origin: http://[": (lambda: head("/v1/models", "GET", "origin: http://[", key=None), {401}),
    "a page elsewhere": (
        lambda: head("/v1/models", "GET", "sec-fetch-site: cross-site", key=None),
        {401},
    ),
    "two lengths": (
        lambda: head(CHAT, "POST", "content-length: 3", "content-length: 4") + b"{}",
        {400},
    ),
    "length and chunks": (
        lambda: (
            head(CHAT, "POST", "content-length: 3", "transfer-encoding: chunked") + b"0\r\n\r\n"
        ),
        {400},
    ),
    "a length without end": (lambda: head(CHAT, "POST", "content-length: " + "9" * 40), {400, 413}),
    "a drain by a tenant": (lambda: head("/v1/nodes/only/drain", "POST"), {403}),
    "a flush by a tenant": (lambda: head("/v1/nodes/only/flush", "POST"), {403}),
    "metrics for a tenant": (lambda: head("/metrics", "GET"), {403}),
    "a token that is none": (
        lambda: chat(b'"logit_bias":{"4000000000":100},' + message(b"hi")),
        {400},
    ),
}
AT_THE_NODE = [name for name in HOSTILE if "header" in name or "URL" in name]


def judge_answers(
    fabric: Attacked, answers: list[bytes], allowed: set[int | None], cpu_s: float
) -> None:
    statuses = {status_of(answer) for answer in answers}
    assert statuses <= allowed, [answer[:300] for answer in answers]
    for answer in answers:
        status = status_of(answer)
        if status is not None and status >= 400:
            assert b'{"error": ' in answer or b'{"error":' in answer
    assert fabric.cpu_s - cpu_s <= REFUSED_CPU_S_MAX * len(answers)
    fabric.judge()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_request_is_refused_cheaply(fabric, name):
    write, allowed = HOSTILE[name]
    raw = write()
    cpu_s = fabric.cpu_s
    judge_answers(fabric, [fabric.send(raw)], allowed, cpu_s)


@pytest.mark.parametrize("name", AT_THE_NODE)
def test_hostile_request_to_node_is_refused_cheaply(fabric, name):
    write, allowed = HOSTILE[name]
    raw = write()
    cpu_s = fabric.cpu_s
    judge_answers(fabric, [fabric.send(raw, node=True)], allowed, cpu_s)


@pytest.mark.parametrize("node", [False, True], ids=["router", "node"])
@pytest.mark.parametrize(
    "opening", sample([b"", b"GET / HTTP/1.1\r\nhost:", post(b"", key=None)[:-4]], b"")
)
def test_thousands_of_idle_connections_do_not_block_others(fabric, node, opening):
    count = min(IDLE, allow_files() // 2)
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(fabric.connect(opening, node=node))
        cpu_s, turns = fabric.cpu_s, fabric.turns
        answer = fabric.send(head("/v1/models", "GET"))
        _wait(lambda: fabric.turns >= turns + 3)
        judge_answers(fabric, [answer], {200}, cpu_s)


def test_unfinished_bodies_are_bounded_per_tenant(fabric):
    opening = head(CHAT, "POST", f"content-length: {BODY_BYTES_MAX}") + b'{"x":"' + b"y" * MIB
    with ExitStack() as stack:
        cpu_s = fabric.cpu_s
        held = [stack.enter_context(fabric.connect(opening)) for _ in range(70)]
        for sock in held:
            sock.settimeout(0.1)
        turns = fabric.turns
        _wait(lambda: fabric.turns >= turns + 3)
        answers: list[bytes] = []

        def is_one_refused() -> bool:
            answers.extend(raw for sock in held if (raw := _now(sock)))
            return bool(answers)

        _wait(is_one_refused)  # one tenant's share is bounded
        judge_answers(fabric, answers, {429}, cpu_s)


def test_dripping_uploads_do_not_block_others(fabric):
    partial_file = b"MFHIBER1\x01\0\0\0\xe6\0\0\0"
    opening = head("/v1/agents/x/resume", "POST", "content-length: 1000000") + partial_file
    with ExitStack() as stack:
        cpu_s = fabric.cpu_s
        for _ in range(16):
            stack.enter_context(fabric.connect(opening))
        hibernated = fabric.send(head("/v1/agents/nobody/hibernate", "POST", key=BOB))
        judge_answers(fabric, [hibernated], {404}, cpu_s)


def test_thousands_of_pipelined_requests_are_bounded(fabric):
    cpu_s = fabric.cpu_s
    for request in (head("/healthz", "GET", key=None), head("/v1/models", "GET"), post(b"{}")):
        answer = fabric.send(request * 5_000)
        judge_answers(fabric, [answer], {200, 400, None}, cpu_s)


def test_stalled_readers_do_not_block_others(fabric):
    with ExitStack() as stack:
        cpu_s = fabric.cpu_s
        for _ in range(50):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(fabric.address)
            sock.sendall(head("/v1/agents", "GET") * 16)
        judge_answers(fabric, [fabric.send(head("/v1/models", "GET"))], {200}, cpu_s)


def test_hostile_requests_together_are_refused(fabric):
    """A tenant's long bodies are processed one at a time; the others wait in order."""
    names = [name for name in HOSTILE if "MiB" in name or "MB" in name]
    answers: list[tuple[str, bytes]] = []

    def attack(part: list[str]) -> None:
        answers.extend((name, fabric.send(HOSTILE[name][0]())) for name in part)

    threads = [threading.Thread(target=attack, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, answer in answers:
        assert status_of(answer) in HOSTILE[name][1] | {429}, name
    assert not fabric.failures, fabric.failures[:5]
    assert fabric.growth_bytes <= 2 * GROWTH_BYTES_MAX


def test_memory_growth_after_all_attacks_is_bounded(fabric, first_bytes):
    assert used(fabric.pid)[1] - first_bytes <= GROWTH_BYTES_MAX


def _now(sock: socket.socket) -> bytes:
    try:
        return first_of(sock)
    except TimeoutError:
        return b""


def _wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
