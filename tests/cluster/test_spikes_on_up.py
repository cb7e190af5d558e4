"""Many turns at once on a real `macfabric up`, where connections to nodes need handshakes."""

import pytest

from tests.support.request_spike import spike_outcomes, start_spike
from tests.support.up_fabric import running_up

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
NAMES = ("node-a", "node-b")
TURNS = 400
ANSWER_TOKENS = 100  # long enough that no turn ends before the last one begins


def test_request_spike_is_served_or_deferred_without_losing_nodes(tmp_path):
    with running_up(tmp_path, names=NAMES, router={"api_keys": {}}) as up:
        outcomes = spike_outcomes(start_spike(up.url, "recall", TURNS, ANSWER_TOKENS))
        log = (up.data / "logs" / "router.log").read_text()

    assert set(outcomes) <= {"200", "429"}, outcomes
    assert outcomes["200"] > 0
    assert "gave up on" not in log
    assert "the lease of" not in log
