"""A backup of one `macfabric up`, restored on another with other keys: agents come back warm."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.fabric_process import ALICE, BOB, ROOT
from tests.support.up_fabric import Up, running_up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KEYS = {"alice": ALICE, "bob": BOB}


def messages(name: str) -> list[dict[str, str]]:
    text = f"The vault code of {name} is otter lantern quartz. " * 40
    return [{"role": "user", "content": text}]


def ask(up: Up, tenant: str, agent: str) -> dict[str, int]:
    """Take a turn; return the numbers of prompt tokens and of reused tokens."""
    body = {"model": "recall", "max_tokens": 4, "messages": messages(agent)}
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-agent-id": agent}
    request = urllib.request.Request(
        f"{up.url}/v1/chat/completions",
        json.dumps(body).encode(),
        headers | {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        usage = json.loads(answer.read())["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached}


def command(home: Path, up: Up, *argv: str) -> tuple[int, dict]:
    main = [sys.executable, "-m", "router.cli.main", *argv, "--data", str(up.data), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home)}
    done = subprocess.run(main, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_agents_of_two_tenants_come_back_warm_on_another_fabric(tmp_path):
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    backup = str(tmp_path / "backup")
    with running_up(homes[0]) as up:
        ask(up, "alice", "mira")
        ask(up, "bob", "ivan")
        status, report = command(homes[0], up, "backup", backup)
    assert status == 0, report
    assert report["keys"] == ["authority.key", "ca.pem", "cluster.key"]
    assert {(r["tenant"], r["id"], r["result"]) for r in report["agents"]} == {
        ("alice", "mira", "saved"),
        ("bob", "ivan", "saved"),
    }

    # The other fabric has only one of the tenants.
    with running_up(homes[1], router={"api_keys": {"alice": ALICE}}) as up:
        assert (up.data / "cluster.key").read_text() != (homes[0] / "data/cluster.key").read_text()
        status, report = command(homes[1], up, "restore", backup)
        warm = ask(up, "alice", "mira")
        again, repeated = command(homes[1], up, "restore", backup, "--agents", "mira")
    assert status == 1
    found = {row["id"]: row for row in report["agents"]}
    assert found["mira"]["result"] == "restored"
    assert found["ivan"]["result"] == "failed"
    assert "no key of its tenant 'bob'" in found["ivan"]["why"]
    assert warm["cached"] >= warm["prompt"] - 1 > 200
    assert (again, repeated["counts"]) == (0, {"skipped": 1})
