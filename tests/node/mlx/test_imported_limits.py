"""Importing the model code leaves the process's limits as they are."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
import node.mlx.loaded_model
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("limit", [1_500, 12_000])
def test_importing_mlx_lm_keeps_the_open_files_limit(limit):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(limit=limit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == f"({limit}, {limit})"
