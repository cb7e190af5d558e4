"""Hundreds of simultaneous requests are served or get 429, and no lease expires."""

import pytest

from tests.support.local_fabric import local_fabric
from tests.support.process_fabric import process_fabric
from tests.support.request_spike import spike_outcomes, start_spike
from tests.support.tiny_models import ONE_LAYER, write_model


def test_a_spike_on_a_small_fabric_is_served_or_put_off(tmp_path):
    """Router and nodes share one Python process here, the worst case for mutual delays."""
    model = str(write_model(tmp_path / "model", ONE_LAYER))
    with local_fabric(tmp_path, model, "mac-a", "mac-b", router={"queue_max": 64}) as fabric:
        fabric.await_agents()
        spike = start_spike(fabric.url, fabric.model_name, 300, max_tokens=2)
        outcomes = spike_outcomes(spike)
        metrics = fabric.http.get("/metrics").text.splitlines()
        nodes = fabric.http.get("/v1/nodes").json()["data"]

    assert set(outcomes) == {"200", "429"}, outcomes
    assert outcomes["200"] >= 2 * 32
    assert "macfabric_expired_leases_total 0.0" in metrics
    assert 'macfabric_waiting_turns{tenant="default"} 0.0' in metrics
    assert f'macfabric_refused_turns_total{{tenant="default"}} {outcomes["429"]}.0' in metrics
    assert [node["state"] for node in nodes] == ["ready"] * 2


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
    assert "macfabric_expired_leases_total 0.0" in metrics
