"""`macfabric serve` expects a number of Macs: no agent is unknown until all have joined."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import yaml

from router.supervise.processes import descendants, wait_for_exit
from tests.cluster.conftest import start_ray
from tests.support.samples import sample
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TIMEOUT_S = 120.0


@pytest.fixture
def ray_of_one(tmp_path):
    folder = tmp_path / "fabric"
    folder.mkdir()
    keeper, ray = start_ray(folder, ("node-a",))
    yield ray, folder
    ray.stop()
    keeper.close()


@pytest.fixture
def cli(ray_of_one, tmp_path):
    ray, folder = ray_of_one
    model = write_model(tmp_path / "tiny", LLAMA | {"num_hidden_layers": 2})
    config = tmp_path / "cluster.yaml"
    provider = {"type": "local", "head_ip": ray.nodes[0].host, "worker_ips": ["192.0.2.1"]}
    section = {"macfabric": {"model": str(model)}}
    config.write_text(yaml.safe_dump({"provider": provider, "metadata": section}))
    log = (tmp_path / "serve.log").open("w+")
    served = []

    def argv(*words):
        return [sys.executable, "-m", "router.cli.main", *words, "--data", str(folder)]

    def serve(*options):
        words = ("--address", ray.address, "--config", str(config), "--port", "0", "--json")
        popen = subprocess.Popen(
            [*argv("serve"), *words, *options],
            env=ray.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        served.append(popen)
        line = popen.stdout.readline()
        assert line, log.seek(0) or log.read()
        return json.loads(line)["url"]

    def run(*words):
        return subprocess.run(
            argv(*words),
            env=ray.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def end():
        popen = served.pop()
        owned = descendants([popen.pid])
        popen.terminate()
        popen.wait(TIMEOUT_S)
        popen.stdout.close()
        assert wait_for_exit(owned, 30.0) == []

    yield serve, run, end
    if served:
        end()
    log.close()


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, dict(response.headers), json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.loads(error.read())


def until_ready(run):
    wait_until(lambda: " ready " in run("nodes").stdout, TIMEOUT_S)


@pytest.mark.nightly
def test_no_agent_is_unknown_before_all_macs_joined(cli):
    serve, run, end = cli
    url = serve()
    until_ready(run)
    status, headers, body = get(url + "/v1/agents/nobody")
    shown = run("agent", "nobody")
    listed = get(url + "/v1/agents")[2]
    end()

    assert (status, body["error"]["code"]) == (503, "agents_unknown")
    assert "1 of 2 nodes" in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    assert shown.returncode == 1
    assert "1 of 2 nodes" in shown.stderr
    assert (listed["complete"], listed["unmet"]) == (False, 1)

    url = serve("--expect", "1")
    until_ready(run)
    assert get(url + "/v1/agents/nobody")[0] == 404
    assert get(url + "/v1/agents")[2]["complete"] is True


@pytest.mark.nightly
def test_router_expects_nodes_of_the_stored_roster(cli, ray_of_one):
    serve, run, end = cli
    roster = ray_of_one[1] / "roster.json"
    serve("--expect", "0")
    until_ready(run)
    # Stored with each heartbeat: at first without the node that became ready.
    wait_until(lambda: roster.exists() and json.loads(roster.read_text())["nodes"], TIMEOUT_S)
    end()
    stored = json.loads(roster.read_text())
    names = [node["name"] for node in stored["nodes"]]
    stored["nodes"].append(stored["nodes"][0] | {"name": "node-b"})
    roster.write_text(json.dumps(stored))
    url = serve("--expect", "0")
    until_ready(run)

    assert names == ["node-a"]
    status, headers, body = get(url + "/v1/agents/nobody")
    assert (status, body["error"]["code"]) == (503, "agents_unknown")
    assert "1 of 2 nodes (node-b)" in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("count", sample(["-1", "1025", "many"], "1025"))
def test_invalid_number_of_expected_nodes_is_a_usage_error(tmp_path, count):
    argv = [sys.executable, "-m", "router.cli.main", "serve", "--data", str(tmp_path)]
    process = subprocess.run(
        [*argv, f"--expect={count}"], capture_output=True, text=True, timeout=60, check=False
    )

    assert process.returncode == 2
    assert "--expect" in process.stderr
