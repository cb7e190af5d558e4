"""The tests of the HTTP API pass against a real `macfabric up`, too.

Otherwise they run against router and nodes in the test's process, without Ray or TLS.
"""

import os
import subprocess
import sys

import pytest

from tests.support.fabric_process import ROOT
from tests.support.local_fabric import REAL_UP

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]
HANG_S = 900
FILES = ("bad_input", "custom_tools", "openapi_cases", "structured", "anthropic", "responses")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_http_tests_pass_on_a_real_fabric(scheme):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    argv += [f"tests/e2e/test_{name}.py" for name in FILES]
    run = subprocess.run(
        argv,
        cwd=ROOT,
        env=os.environ | {REAL_UP: scheme},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    print(run.stdout[-500:])
    assert run.returncode == 0, run.stdout[-8_000:]
