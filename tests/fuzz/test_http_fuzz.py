"""Arbitrary bytes at the ports of a real router and node: no 5xx, and no other client notices.

Inputs follow from (shard, index). `make test-all TESTS=tests/fuzz` tries many more.
"""

import os
import random
import time

import pytest

from tests.fuzz.http_inputs import Hostile, hostile
from tests.support.fabric_process import (
    BOB,
    REFUSED_CPU_S_MAX,
    Attacked,
    attacked,
    first_of,
    status_of,
)

INPUTS = 200
NIGHTLY_INPUTS, SHARDS = 20_000, 5
ANSWER_S = 0.3  # for an answer, before the connection is left behind
LEFT_MAX = 200  # of them at a time
WORDS_OF_BUSY_SERVERS = {503, 507, 529}
HEAD_STATUSES = {414, 431}


def attack(fabric: Attacked, shard: int, count: int) -> dict[int | None, int]:
    """Send `count` inputs; return how often which status was the first one."""
    seen: dict[int | None, int] = {}
    left = []
    for index in range(count):
        rng = random.Random(f"{shard} {index}")
        attempt, cpu_s = hostile(rng, BOB), fabric.cpu_s
        answer = _answer(fabric, attempt, left)
        status = status_of(answer)
        seen[status] = seen.get(status, 0) + 1
        where = f"shard {shard}, input {index}: {answer[:200]!r} to {attempt.parts!r:.2000}"
        assert status is None or status < 500 or status in WORDS_OF_BUSY_SERVERS, where
        if attempt.is_strange:
            assert status is None or 400 <= status < 500, where
        if attempt.is_excessive:
            is_reported = status in HEAD_STATUSES or b'"invalid_http"' in answer
            assert status is None or is_reported, where
        assert fabric.cpu_s - cpu_s <= REFUSED_CPU_S_MAX, where
        if len(left) > LEFT_MAX:
            left.pop(0).close()
        if index % 100 == 99:
            fabric.judge()
    for sock in left:
        sock.close()
    fabric.judge()
    return seen


def _answer(fabric: Attacked, attempt: Hostile, left: list) -> bytes:
    sock = fabric.connect(attempt.parts[0], node=attempt.to_node)
    sock.settimeout(ANSWER_S)
    try:
        for part in attempt.parts[1:]:
            time.sleep(0.002)
            sock.sendall(part)
        return b"" if attempt.hangs_up else first_of(sock)
    except (TimeoutError, ConnectionError):
        left.append(sock)  # unfinished: it stays open beside what comes next
        sock = None
        return b""
    finally:
        if sock is not None:
            sock.close()


@pytest.mark.slow
def test_hostile_http_gets_no_server_error(tmp_path):
    with attacked(tmp_path) as fabric:
        seen = attack(fabric, int(os.environ.get("MACFABRIC_FUZZ_SHARD", "0")), INPUTS)

    assert seen.get(400, 0) > 10, seen
    assert seen.get(200, 0) > 0, "some of it is served"
    assert {401, 404} <= seen.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(SHARDS))
def test_hostile_http_gets_no_server_error_nightly(tmp_path, shard):
    with attacked(tmp_path) as fabric:
        attack(fabric, shard, NIGHTLY_INPUTS)
