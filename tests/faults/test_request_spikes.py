"""Hundreds of requests at once are served or answered with 429, and no lease ends."""

import pytest

from tests.support.process_fabric import process_fabric
from tests.support.request_spike import spike_outcomes, start_spike


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("count", [450, 1000])
def test_request_spike_is_served_or_deferred(tmp_path, count):
    with process_fabric(tmp_path, "recall", "mac-a", "mac-b") as fabric:
        fabric.await_agents()
        outcomes = spike_outcomes(start_spike(fabric.url, fabric.model_name, count))
        metrics = fabric.http.get("/metrics").text.splitlines()

    assert set(outcomes) <= {"200", "429"}, outcomes
    assert outcomes["200"] > 0
    assert "macfabric_expired_leases 0.0" in metrics
