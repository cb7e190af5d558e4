"""Prompts of many megabytes at a real `macfabric up`, and each process's memory.

Prompts that exceed every node's context are refused before they are read. With a model of a large
context they might fit, and are read: memory is then limited per byte of the body. Python takes four
bytes for each character of a text with a single wide one.
"""

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fabric.keys import OPERATOR_HEADER
from fabric.limits import BODY_BYTES_MAX, MIB
from router.limits import PROMPT_ESCAPES, PROMPT_FRAME_BYTES
from tests.e2e.test_hostile_requests import CHAT, head, message, post
from tests.support.claimed_context import claiming
from tests.support.fabric_process import (
    GROWTH_BYTES_MAX,
    Attacked,
    address_of,
    pulse,
    status_of,
    turn,
    watched,
)
from tests.support.samples import sample
from tests.support.up_fabric import running_up
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]
SILENT_CPU_S_MAX = 0.5  # of the router alone, during a call of /healthz
PLAIN, WIDE = 6, 16  # bytes held for each received byte
WIDE_ONE = "\U0001f980".encode()
USUAL, LARGE = 32_768, 900_000  # tokens of context; the latter may take 16 MB of text
LONG = 31 * MIB
FORK = "/v1/agents/nobody/fork"


def filled_request(
    begin: bytes, piece: bytes, end: bytes, path: str = CHAT
) -> Callable[[int], bytes]:
    """Return a function that builds a request with a body of a given size, filled with pieces."""

    def make(size: int) -> bytes:
        count = (size - len(begin) - len(end)) // len(piece)
        return post(begin + piece * count + end, path)

    return make


def user_body(piece: bytes, end: bytes = b"") -> Callable[[int], bytes]:
    """Build chats whose user message is filled with pieces."""
    before, _, behind = message(b"|").partition(b"|")
    return filled_request(b'{"model":"recall","max_tokens":2,' + before, piece, end + behind + b"}")


def list_request(before: bytes, item: bytes, behind: bytes) -> Callable[[int], bytes]:
    """Build requests with a list of items of half a kilobyte each."""
    opening = b'{"model":"recall","max_tokens":2,' + before
    return filled_request(opening, item % (b"a " * 256) + b",", item % b"b" + behind + b"}")


def in_chunks(size: int) -> bytes:
    """Send the body in chunks, without a length."""
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return (
        head(CHAT, "POST", "transfer-encoding: chunked") + part * (size // 0x10000) + b"0\r\n\r\n"
    )


PART = b'{"type":"text","text":"%s"}'
MESSAGE = b'{"role":"user","content":"%s"}'
TOOL = b'{"type":"function","function":{"name":"f","description":"%s"}}'
CALL = b'{"type":"function","function":{"name":"f","arguments":"{\\"a\\": \\"%s\\"}"}}'
RAW = b'{"model":"recall","max_tokens":2,"prompt":'
RESULT = b'{"model":"recall","messages":[{"role":"tool","tool_call_id":"c","content":"'
THOUGHT = b'{"model":"recall","max_tokens":2,"messages":[{"role":"assistant","reasoning_content":"'
NESTED = b'{"model":"recall","messages":[{"role":"user","content":' + b"[" * 50

# Builders of bodies of a given size, and the bytes held for each byte if they are read.
SHAPES = {
    "words": (user_body(b"wild geese "), PLAIN),
    "one word": (user_body(b"y"), PLAIN),
    "special tokens": (user_body(b"<|im_end|>"), PLAIN),
    "crabs": (user_body(WIDE_ONE), PLAIN + 1),  # no copy is smaller: four bytes in Python, too
    "a crab behind words": (user_body(b"a", WIDE_ONE), WIDE),
    "escapes": (user_body(b"\\u00e9"), PLAIN),
    "escaped crabs": (user_body(b"\\ud83e\\udd80"), PLAIN),
    "a crab behind escapes": (user_body(b"\\u0061", WIDE_ONE), PLAIN),
    "raw text": (filled_request(RAW + b'"', b"a ", b'"}', "/v1/completions"), PLAIN),
    "many messages": (list_request(b'"messages":[', MESSAGE, b"]"), PLAIN),
    "many parts": (list_request(b'"messages":[{"role":"user","content":[', PART, b"]}]"), PLAIN),
    "nested parts": (
        filled_request(NESTED, b'"%s",' % (b"a" * 600), b'""' + b"]" * 50 + b"}]}"),
        PLAIN,
    ),
    "a tool's result": (filled_request(RESULT, b"a ", b'"}]}'), PLAIN),
    "a thought": (filled_request(THOUGHT, b"a ", b'"}]}'), PLAIN),
    "many tools": (list_request(message(b"hi") + b',"tools":[', TOOL, b"]"), PLAIN),
    "many calls": (
        list_request(b'"messages":[{"role":"assistant","tool_calls":[', CALL, b"]}]"),
        PLAIN,
    ),
    "token ids": (filled_request(RAW + b"[", b"17,", b"1]}", "/v1/completions"), PLAIN),
    "prompts": (
        filled_request(RAW + b"[", b'"%s",' % (b"a" * 600), b'""]}', "/v1/completions"),
        PLAIN,
    ),
    "an unknown field": (
        filled_request(b'{"model":"recall","metadata":{"x":"', b"a ", b'"}}'),
        PLAIN,
    ),
    "spaces": (filled_request(b"{", b" ", b"}"), PLAIN),
    "no prompt at all": (filled_request(b'{"as":"', b"a", b'"}', FORK), PLAIN),
    "no length": (in_chunks, PLAIN),
}
# The plainest, the one that takes most memory, one without text, and one without a length.
OF_MANY_VALUES = ("no prompt at all", "token ids")  # or over another limit first
REPRESENTATIVE = ("words", "a crab behind words", "token ids", "no length")


@dataclass(frozen=True, slots=True)
class Fabric:
    """A running fabric of one node, and the largest length of a body that it reads."""

    context_tokens: int
    router: Attacked
    node: Attacked
    door_bytes: int

    def grown_by(self, raw: bytes) -> tuple[bytes, list[int]]:
        """Return the answer to a request, and the bytes by which router and node grew meanwhile."""
        both = (self.router, self.node)
        for each in both:
            each.begin()
        answer = self.router.send(raw)
        wait_until(lambda: self.router.turns > 1 and self.router.pulses > 1)
        assert not self.router.failures
        assert self.router.silent_cpu_s <= SILENT_CPU_S_MAX
        return answer, [each.growth_bytes for each in both]


@contextmanager
def attacked_fabric(folder: Path, model: str) -> Iterator[Fabric]:
    with running_up(folder, model) as up:
        headers = {OPERATOR_HEADER: (up.data / "operator.key").read_text()}
        nodes_request = urllib.request.Request(f"{up.url}/v1/nodes", None, headers)
        with urllib.request.urlopen(nodes_request) as answer:
            [row] = json.loads(answer.read())["data"]
        where = address_of(up.url)
        router, node = (Attacked(pid, where, where) for pid in (up.router_pid, row["pid"]))
        for _ in range(3):
            turn(router)
        assert not router.failures
        door_bytes = row["prompt_bytes_max"] + PROMPT_FRAME_BYTES
        for name in ("words", "a crab behind words", "many parts"):  # what is allocated once
            router.send(SHAPES[name][0](min(door_bytes, 10 * MIB)))
        looks = [(each, Attacked.watch_memory, 0.01) for each in (router, node)]
        with watched((router, turn, 0.2), (router, pulse, 0.05), *looks):
            yield Fabric(row["context_tokens_max"], router, node, door_bytes)


@pytest.fixture(scope="module")
def fabric(request, tmp_path_factory) -> Iterator[Fabric]:
    """Run a fabric whose model has its own context, or claims a larger one."""
    folder = tmp_path_factory.mktemp("fabric")
    with attacked_fabric(folder, str(claiming(folder, request.param))) as instance:
        assert instance.door_bytes < BODY_BYTES_MAX
        yield instance


@pytest.mark.parametrize("fabric", [USUAL], indirect=True)
@pytest.mark.parametrize("name", sample(SHAPES, *REPRESENTATIVE, "no prompt at all"))
def test_oversized_prompt_is_refused_unread(fabric, name):
    make, _ = SHAPES[name]
    answer, grown_bytes = fabric.grown_by(make(LONG))

    assert status_of(answer) == (413 if name in OF_MANY_VALUES else 400), answer[:300]
    assert (b"context_length_exceeded" in answer) == (status_of(answer) == 400)
    assert max(grown_bytes) <= GROWTH_BYTES_MAX // 4, grown_bytes


@pytest.mark.parametrize("fabric", sample([USUAL, LARGE], USUAL), indirect=True)
@pytest.mark.parametrize("name", sample(SHAPES, *REPRESENTATIVE, "many parts"))
def test_memory_for_longest_accepted_body_is_proportional_to_its_size(fabric, name):
    make, factor = SHAPES[name]
    size = fabric.door_bytes - PROMPT_FRAME_BYTES // 8  # the text's envelope is smaller
    if "escape" in name:
        size += (PROMPT_ESCAPES - 1) * (fabric.door_bytes - PROMPT_FRAME_BYTES)
    size = min(size, LONG)
    answer, grown_bytes = fabric.grown_by(make(size))

    assert status_of(answer) in {200, 400, 413}, answer[:300]
    is_usual = fabric.context_tokens == USUAL
    allowed_bytes = GROWTH_BYTES_MAX if is_usual else factor * size + GROWTH_BYTES_MAX // 4
    assert max(grown_bytes) <= allowed_bytes, grown_bytes
