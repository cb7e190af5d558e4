"""`macfabric support-bundle` of a real fabric: useful, and without secrets or prompts."""

import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest

from tests.support.fabric_process import ROOT
from tests.support.up_fabric import running_up

TENANT, AGENT, GROUP = "umbrella-corp", "quincuncial", "hexagonal"
PROMPT = "xylographic"
API_KEY, OPERATOR_KEY = "tenant-key-of-umbrella", "operator-key-of-umbrella"
KEYS = (API_KEY, OPERATOR_KEY)
KEPT_IN_FOLDER = ("cluster.key", "ray.token", "operator.key", "watch.key")


def bundle(home: Path, data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "router.cli.main", "support-bundle", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home)}
    environment |= {"MACFABRIC_API_KEY": API_KEY}
    argv += ["--data", str(data)]
    return subprocess.run(
        argv, cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def unpacked(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        members = tar.getmembers()
        assert all(member.isfile() for member in members)
        return {
            member.name.removeprefix("macfabric-support/"): tar.extractfile(member).read()
            for member in members
        }


def post(url: str, path: str, body: dict, **headers: str) -> None:
    own = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), own | headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def talk(url: str) -> None:
    """Take a turn, replace a part of it by a directive, and take another turn."""
    content = f"The vault code of {PROMPT} is otter."
    body = {"model": "recall", "max_tokens": 2, "prompt_cache_key": GROUP}
    body["messages"] = [
        {"role": "user", "content": "Remember what I say. " * 30},  # kept by directives
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": content},
    ]
    post(url, "/v1/chat/completions", body, **{"x-agent-id": AGENT})
    directive = {"text": "vault", "replacement": f"{PROMPT} again"}
    post(url, f"/v1/agents/{AGENT}/directives", {"directives": [directive]})
    body["messages"] = [{"role": "user", "content": "hello"}]
    post(url, "/v1/chat/completions", body)


@pytest.mark.cluster
@pytest.mark.slow
def test_bundle_of_running_fabric_holds_no_secret_prompt_or_name(tmp_path):
    router = {"api_keys": {TENANT: API_KEY}, "operator_keys": {"wesker": OPERATOR_KEY}}
    with running_up(tmp_path, router=router) as up:
        talk(up.url)
        secrets = [(up.data / name).read_text().strip() for name in KEPT_IN_FOLDER]
        secrets += (up.data / "member.key").read_text().splitlines()[1:3]
        with (up.data / "logs/planted.log").open("w") as log:
            log.write(f"2026-11-29 04:47:43,414 INFO {TENANT} {AGENT} sent {API_KEY}\n")
            log.write(f"ValueError: {PROMPT} and {secrets[0]}\n{PROMPT}\n")
        done = bundle(tmp_path, up.data, "one.tar.gz", "--json")
        named = bundle(tmp_path, up.data, "named.tar.gz", "--with-names", "--log-mib", "0")
    assert (done.returncode, named.returncode) == (0, 0), (done.stderr, named.stderr)
    files = unpacked(tmp_path / "one.tar.gz")
    report = json.loads(done.stdout)

    # No secret, prompt or name is in any file's content or name.
    everything = b"\n".join([done.stdout.encode(), *files.values(), *map(str.encode, files)])
    for word in (TENANT, AGENT, GROUP, PROMPT, *KEYS, "wesker", "otter", "vault", *secrets):
        assert word.encode() not in everything, word
    assert not re.search(rb"node-a(?![0-9a-f])", everything), "only aliases may begin with node-a"
    # A maintainer's first questions have answers.
    assert [entry["name"] for entry in report["entries"]] == list(files)[1:]
    agents, nodes = json.loads(files["agents.json"]), json.loads(files["nodes.json"])
    assert [row["id"].startswith("agent-") for row in agents] == [True, True]
    assert sorted(row["directives_count"] for row in agents) == [0, 1]
    assert agents[0]["tenant"].startswith("tenant-")
    assert nodes[0]["state"] == "ready"
    assert nodes[0]["name"] == agents[0]["owner"]
    assert json.loads(files["versions.json"])["packages"]["ray"]
    assert b"macfabric_requests_total" in files["metrics.txt"]
    assert b"turn.ended" in files["events.json"]
    assert json.loads(files["settings.json"])["model"] == "recall"
    assert json.loads(files["certificates.json"])[0]["days_left"] > 300
    assert b"length: 0 of" in files[f"logs/node.{nodes[0]['name']}.jsonl"]
    assert files["logs/planted.log"].endswith(b"ValueError\n")
    assert stat.S_IMODE((tmp_path / "one.tar.gz").stat().st_mode) == 0o600
    # With names, the bundle has no secrets, and logs are within their limit.
    kept = unpacked(tmp_path / "named.tar.gz")
    assert (TENANT, AGENT) in {(r["tenant"], r["id"]) for r in json.loads(kept["agents.json"])}
    for word in (PROMPT, *KEYS, *secrets):
        assert word.encode() not in b"\n".join(kept.values()), word
    assert not [name for name in kept if name.startswith("logs/") and kept[name]]

    # After the fabric's end, files on disk are included, with the same aliases.
    after = bundle(tmp_path, up.data, "two.tar.gz")
    assert after.returncode == 0, after.stderr
    late = unpacked(tmp_path / "two.tar.gz")
    assert "no fabric answers" in json.loads(late["nodes.json"])["problem"]
    assert "No fabric is running" in json.loads(late["contents.json"])["fabric"]
    assert f"logs/node.{nodes[0]['name']}.jsonl" in late
    assert json.loads(late["exits.json"])["marks_on_disk"][nodes[0]["name"]]["cause"]
    assert "not in it: prompts" in after.stdout


def test_names_that_only_settings_have_are_replaced(tmp_path):
    router = {"tenant_limits": {TENANT: {"turns": 2}}, "standby": True}
    router["voters"] = ["https://raccoon-city.example:9400"]
    options = {"nested": {"password": "short", "auth_pin": 47_110_815}, "list": [{"token": "tiny"}]}
    router["policies"] = [{"use": "mine:Policy", "options": options}]
    settings = {"router": router, "tracing": {"endpoint": "http://arklay.example:4318"}}
    config = tmp_path / "cluster.yaml"
    config.write_text(json.dumps({"metadata": {"macfabric": settings}}))
    done = bundle(tmp_path, tmp_path / "none", "a.tar.gz", "--config", str(config))
    assert done.returncode == 0, done.stderr
    text = unpacked(tmp_path / "a.tar.gz")["settings.json"].decode()

    assert json.loads(text)["router"]["tenant_limits"]
    for name in (TENANT, "raccoon-city", "arklay", "short", "tiny", "47110815"):
        assert name not in text


def test_bundle_without_any_fabric_lists_every_entry(tmp_path):
    done = bundle(tmp_path, tmp_path / "none", "a.tar.gz")
    assert done.returncode == 0, done.stderr
    files = unpacked(tmp_path / "a.tar.gz")

    assert set(files) >= {"contents.json", "versions.json", "machine.json", "doctor.json"}
    for name in list(files)[1:]:
        assert f"\n{name} " in f"\n{done.stdout}"
    again = bundle(tmp_path, tmp_path / "none", "a.tar.gz")
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert bundle(tmp_path, tmp_path / "none", "a.tar.gz", "--force").returncode == 0
    refused = bundle(tmp_path, tmp_path / "none", "b.tar.gz", "--log-mib", "65")
    assert (refused.returncode, (tmp_path / "b.tar.gz").exists()) == (2, False)
    usual = bundle(tmp_path, tmp_path / "none")
    assert usual.returncode == 0
    assert len(list(tmp_path.glob("macfabric-support-*.tar.gz"))) == 1
    # The bundle contains neither the user's folder nor this machine's name.
    everything = b"\n".join(files.values())
    assert str(tmp_path).encode() not in everything
    name = re.escape(os.uname().nodename.encode())
    assert re.search(rb"(?<![\w-])%s(?![\w-])" % name, everything) is None
