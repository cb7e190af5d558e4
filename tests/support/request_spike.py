"""Many chats at once from a separate process: `python -m tests.support.request_spike`.

A client in the router's process would take time of the router's event loop.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 900.0


async def _ask(client: Any, model: str, number: int, max_tokens: int) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Number {number}. " + "word " * 100}],
        "max_tokens": max_tokens,
    }
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    except httpx2.HTTPError as error:
        return type(error).__name__
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    return str(answer.status_code)


async def _spike(url: str, model: str, count: int, max_tokens: int) -> Counter[str]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as client:
        chats = (_ask(client, model, n, max_tokens) for n in range(count))
        return Counter(await asyncio.gather(*chats))


def start_spike(url: str, model: str, count: int, max_tokens: int = 8) -> "subprocess.Popen[str]":
    """Send `count` chats at once to a fabric; pass the process to `spike_outcomes`."""
    argv = [sys.executable, "-m", "tests.support.request_spike", url, model]
    argv += [str(count), str(max_tokens)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def spike_outcomes(spike: "subprocess.Popen[str]") -> dict[str, int]:
    """Count chats by status, or by kind of broken connection."""
    output, _ = spike.communicate(timeout=HANG_S)
    assert spike.returncode == 0
    outcomes: dict[str, int] = json.loads(output)
    return outcomes


if __name__ == "__main__":
    _, address, served, *numbers = sys.argv
    print(json.dumps(asyncio.run(_spike(address, served, *map(int, numbers)))))
