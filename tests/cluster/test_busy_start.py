"""`macfabric up` on a busy machine starts, or names the cause."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.conftest import ROOT
from tests.support.tiny_models import LLAMA, write_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
BUSY_PER_CORE = 10
LIMIT_S = 1_500.0


@pytest.fixture
def busy():
    """Keep ten processes busy on every core."""
    count = BUSY_PER_CORE * (os.cpu_count() or 2)
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield children
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("busy")
def test_three_nodes_start_on_a_busy_machine_or_name_the_cause(tmp_path):
    model = write_model(tmp_path / "tiny", LLAMA | {"num_hidden_layers": 2})
    main = [sys.executable, "-m", "router.cli.main"]
    data = ["--data", str(tmp_path / "data")]
    log = tmp_path / "up.log"
    with log.open("w") as log_file:
        up = subprocess.Popen(
            [*main, "up", "--nodes", "3", "--model", str(model), "--port", "0", "--json", *data],
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
        )
    try:
        line = up.stdout.readline()
        output = log.read_text()
        print(output)
        if line:
            ready = json.loads(line)
            print(f"ready after {ready['seconds']} s: {ready['phases']}")
            assert len(ready["nodes"]) == 3
        else:
            assert up.wait(60) == 1
            assert "(empty)" not in output, "the quoted log does not show the cause"
            assert ".log:" in output
    finally:
        up.terminate()
        up.wait(LIMIT_S)
        up.stdout.close()
