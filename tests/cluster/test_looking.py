"""Commands that show the state of a running `macfabric up`."""

import json
import os
import subprocess
import sys
import time

import pytest

from router.client.client import Fabric
from tests.cluster.conftest import ROOT
from tests.support.fabric_process import ALICE
from tests.support.up_fabric import running_up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    with running_up(tmp_path_factory.mktemp("looking")) as up:
        yield up


def macfabric(up, *argv, **environment):
    """Run a command on the fabric's own machine; return its output."""
    return subprocess.run(
        [sys.executable, "-m", "router.cli.main", *argv], text=True, capture_output=True,
        check=True, timeout=60, cwd=up.data, env=os.environ | environment | {
            "PYTHONPATH": str(ROOT), "MACFABRIC_DATA": str(up.data), "MACFABRIC_API_KEY": ALICE,
        },
    ).stdout  # fmt: skip


def test_config_show_names_the_options_of_up(up):
    shown = json.loads(macfabric(up, "config", "show", "--json"))
    rows = {row["name"]: row for row in shown["settings"]}

    assert shown["source"] == "running"
    assert rows["router.port"]["origin"]["place"] == "up --port"
    assert rows["local_nodes"]["origin"]["line"]
    assert rows["router.api_keys.alice"]["value"] == "set"
    assert (up.data / "settings.json").stat().st_mode & 0o077 == 0


def test_top_shows_the_node_and_the_last_turn(up):
    ask = Fabric(up.url, key=ALICE, timeout_s=60.0, trusted=(up.data / "ca.pem",))
    ask.agent("mira").generate("hello", max_tokens=4)
    deadline_s, ram_bytes = time.monotonic() + 30, 0
    while not ram_bytes and time.monotonic() < deadline_s:  # the router receives it every second
        printed = json.loads(macfabric(up, "top", "--once", "--json"))
        (node,), (agent,) = printed["nodes"], printed["agents"]
        ram_bytes = node["ram_bytes"]

    assert (node["name"], node["state"]) == ("node-a", "ready")
    assert 0 < ram_bytes <= node["ram_limit_bytes"]
    assert 0 < node["first_token_s"] == agent["last_turn"]["times"]["first_token_s"]
    assert (agent["id"], agent["node"], agent["tier"]) == ("mira", "node-a", "hot")
    assert "mira" in macfabric(up, "top")


def test_tab_key_completes_the_names_of_nodes(up, tmp_path):
    line, output = "macfabric drain ", tmp_path / "completions"
    completion_environment = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    macfabric(up, **completion_environment, _ARGCOMPLETE_STDOUT_FILENAME=str(output))

    assert output.read_text().strip() == "node-a"
