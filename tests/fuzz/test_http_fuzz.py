"""Arbitrary bytes to the ports of a real router and node: no 5xx, and other clients are unaffected.

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
ANSWER_S = 0.3  # for an answer, before the connection is left open
UNFINISHED_MAX = 200  # connections left open at a time
WORDS_OF_BUSY_SERVERS = {503, 507, 529}
HEAD_STATUSES = {414, 431}


def attack(fabric: Attacked, shard: int, count: int) -> dict[int | None, int]:
    """Send `count` inputs; count their first statuses."""
    status_counts: dict[int | None, int] = {}
    open_sockets = []
    for index in range(count):
        rng = random.Random(f"{shard} {index}")
        attempt, cpu_s = hostile(rng, BOB), fabric.cpu_s
        answer = _answer(fabric, attempt, open_sockets)
        status = status_of(answer)
        status_counts[status] = status_counts.get(status, 0) + 1
        where = f"shard {shard}, input {index}: {answer[:200]!r} to {attempt.parts!r:.2000}"
        assert status is None or status < 500 or status in WORDS_OF_BUSY_SERVERS, where
        if attempt.is_strange:
            assert status is None or 400 <= status < 500, where
        if attempt.is_excessive:
            is_reported = status in HEAD_STATUSES or b'"invalid_http"' in answer
            assert status is None or is_reported, where
        assert fabric.cpu_s - cpu_s <= REFUSED_CPU_S_MAX, where
        if len(open_sockets) > UNFINISHED_MAX:
            open_sockets.pop(0).close()
        if index % 100 == 99:
            fabric.judge()
    for sock in open_sockets:
        sock.close()
    fabric.judge()
    return status_counts


def _answer(fabric: Attacked, attempt: Hostile, open_sockets: list) -> bytes:
    sock = fabric.connect(attempt.parts[0], node=attempt.to_node)
    sock.settimeout(ANSWER_S)
    try:
        for part in attempt.parts[1:]:
            time.sleep(0.002)
            sock.sendall(part)
        return b"" if attempt.hangs_up else first_of(sock)
    except (TimeoutError, ConnectionError):
        open_sockets.append(sock)  # unfinished: it stays open during later inputs
        sock = None
        return b""
    finally:
        if sock is not None:
            sock.close()


@pytest.mark.slow
def test_hostile_http_gets_no_server_error(tmp_path):
    with attacked(tmp_path) as fabric:
        status_counts = attack(fabric, int(os.environ.get("MACFABRIC_FUZZ_SHARD", "0")), INPUTS)

    assert status_counts.get(400, 0) > 10, status_counts
    assert status_counts.get(200, 0) > 0, "no input was served"
    assert {401, 404} <= status_counts.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(SHARDS))
def test_hostile_http_gets_no_server_error_nightly(tmp_path, shard):
    with attacked(tmp_path) as fabric:
        attack(fabric, shard, NIGHTLY_INPUTS)
