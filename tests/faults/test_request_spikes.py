"""Hundreds of requests at once are served or answered with 429, and no lease ends."""

import asyncio
from collections import Counter

import httpx2
import pytest

from tests.support.process_fabric import process_fabric

HANG_S = 900.0


async def _ask(client, model, number):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Number {number}. " + "word " * 100}],
        "max_tokens": 8,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code


async def _spike(url, model, count):
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as client:
        return Counter(await asyncio.gather(*(_ask(client, model, n) for n in range(count))))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("count", [450, 1000])
def test_a_spike_of_requests_is_served_or_put_off(tmp_path, count):
    with process_fabric(tmp_path, "recall", "mac-a", "mac-b") as fabric:
        fabric.await_agents()
        outcomes = asyncio.run(_spike(fabric.url, fabric.model_name, count))
        metrics = fabric.http.get("/metrics").text.splitlines()

    assert set(outcomes) <= {200, 429}, outcomes
    assert outcomes[200] > 0
    assert "macfabric_expired_leases 0.0" in metrics
