"""Prompts of many megabytes at a real `macfabric up`, and what each process holds of them.

A body is held as it came, as text and as what was parsed of it; Python keeps four bytes for each
character of a text that holds one wide one. So memory is judged in bytes per byte of the body.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from fabric.keys.api_keys import OPERATOR_HEADER
from fabric.limits import MIB
from router.supervise.processes import descendants, wait_gone
from tests.e2e.test_hostile_requests import chat, message, post
from tests.support.fabric_process import (
    ALICE,
    BOB,
    GROWTH_BYTES_MAX,
    ROOT,
    Attacked,
    address_of,
    pulse,
    status_of,
    turn,
    watched,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]
SILENT_CPU_S_MAX = 0.5  # of the router alone, while /healthz is waited for
PLAIN, WIDE = 6, 16  # bytes held for each byte that came
WIDE_ONE = "\U0001f980".encode()
PROMPTS = {
    "words": (lambda size: chat(message(b"wild geese " * (size // 11))), PLAIN),
    "one word": (lambda size: chat(message(b"y" * size)), PLAIN),
    "special tokens": (lambda size: chat(message(b"<|im_end|>" * (size // 10))), PLAIN),
    "crabs": (lambda size: chat(message(WIDE_ONE * (size // 4))), PLAIN),
    "a crab behind words": (lambda size: chat(message(b"a" * (size - 4) + WIDE_ONE)), WIDE),
    "escapes": (lambda size: chat(message(b"\\u00e9" * (size // 6))), PLAIN),
    "raw text": (
        lambda size: post(
            b'{"model":"recall","prompt":"' + b"a " * (size // 2) + b'"}', "/v1/completions"
        ),
        PLAIN,
    ),
}


@contextmanager
def running(folder: Path) -> Iterator[str]:
    config = folder / "cluster.yaml"
    keys = {"router": {"api_keys": {"alice": ALICE, "bob": BOB}}}
    config.write_text(yaml.safe_dump({"metadata": {"macfabric": keys}}))
    argv = [sys.executable, "-m", "router.cli.main", "up", "--nodes", "1", "--port", "0"]
    argv += ["--config", str(config), "--data", str(folder / "data"), "--json"]
    with (folder / "log").open("w") as log:
        up = subprocess.Popen(
            argv,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    owned = []
    try:
        line = up.stdout.readline()
        assert line, (folder / "log").read_text()
        owned = descendants([up.pid])
        yield json.loads(line)["url"]
    finally:
        up.terminate()
        up.wait(60)
        up.stdout.close()
        assert wait_gone(owned, 30.0) == []


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Iterator[tuple[Attacked, Attacked]]:
    folder = tmp_path_factory.mktemp("fabric")
    with running(folder) as url:
        headers = {OPERATOR_HEADER: (folder / "data" / "operator.key").read_text()}
        asked = urllib.request.Request(f"{url}/v1/nodes", None, headers)
        with urllib.request.urlopen(asked) as answer:
            [row] = json.loads(answer.read())["data"]
        [router_pid] = [p.pid for p in descendants([os.getpid()]) if is_router(p.pid)]
        where = address_of(url)
        router, node = (Attacked(pid, where, where) for pid in (router_pid, row["pid"]))
        for _ in range(3):
            turn(router)
        assert not router.failures
        for name in ("words", "a crab behind words"):  # what is allocated once
            router.send(PROMPTS[name][0](10 * MIB))
        router.begin()
        node.begin()
        looks = [(each, Attacked.watch_memory, 0.01) for each in (router, node)]
        with watched((router, turn, 0.2), (router, pulse, 0.05), *looks):
            yield router, node


def is_router(pid):
    try:
        return b"-m\0router\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("size", [10 * MIB, 31 * MIB], ids=["10 MiB", "31 MiB"])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_long_prompt_is_refused_and_costs_each_process_little(fabric, name, size):
    router, node = fabric
    make, factor = PROMPTS[name]
    raw = make(size)
    router.begin()
    node.begin()
    answer = router.send(raw)
    until(lambda: router.turns > 1 and router.pulses > 1)
    found = [(each.growth_bytes // MIB, each.silent_cpu_s) for each in fabric]

    assert status_of(answer) == 400, answer[:300]
    assert b"context" in answer
    assert not router.failures
    assert router.silent_cpu_s <= SILENT_CPU_S_MAX, found
    for each in fabric:
        assert each.growth_bytes <= factor * size + GROWTH_BYTES_MAX // 4, found


def until(holds):
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)
