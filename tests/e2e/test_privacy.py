"""Disks, logs and metrics contain digests and numbers, and only their owner can read them."""

import logging
import re
import stat
from pathlib import Path

from tests.support.local_fabric import local_fabric

CANARY = "xylographiccanary"
OWNERS_CANARY = "quincuncialcanary"
# The test's own clients log their requests at this level.
OURS = ("node", "fabric", "router", "macfabric", "uvicorn", "aiohttp", "asyncio", "starlette")
FILES = {
    "blocks": re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}\.(full|window|state)"),
    "manifests": re.compile(r"[0-9a-f]{32}\.mf"),
    "quarantine": re.compile(r"[0-9a-f-]{32,97}\.[a-z]+\.[a-z0-9-]+"),
}


def user(text):
    return {"role": "user", "content": text}


def test_prompts_and_names_stay_out_of_paths_logs_and_metrics(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with local_fabric(tmp_path, "recall", "left", "right") as fabric:
        words = [user(f"The vault code of {CANARY} is otter quartz. " * 30)]
        first = fabric.chat(words, OWNERS_CANARY)
        words += [{"role": "assistant", "content": first.text}, user(f"{CANARY} again")]
        damage(tmp_path / first.node)
        fabric.drop_hot()
        fabric.chat(words, OWNERS_CANARY)
        fabric.chat([user(f"{CANARY} " * 5)])
        refused = fabric.http.post(
            "/v1/chat/completions", json={"model": "recall", "messages": words, "n": CANARY}
        )
        assert refused.status_code == 400
        other = "right" if first.node == "left" else "left"
        fabric.migrate(OWNERS_CANARY, other)
        fabric.http.post(f"/v1/agents/{OWNERS_CANARY}/pin", json={"pinned": True})
        fabric.restart(other)
        public_output = "".join(
            fabric.http.get(path).text for path in ("/metrics", "/healthz", "/v1/nodes")
        )
        check_files(tmp_path)
        fabric.http.delete(f"/v1/agents/{OWNERS_CANARY}")
        check_files(tmp_path)
    logged = [r.getMessage() + str(r.exc_text) for r in caplog.records if r.name.startswith(OURS)]
    assert any("quarantined" in line for line in logged)
    assert "macfabric_prompt_tokens" in public_output
    printed = "".join(capfd.readouterr())
    for text in (public_output, printed, *logged):
        assert CANARY not in text.lower()
        assert OWNERS_CANARY not in text


def damage(folder):
    """Flip a bit in every block of a node."""
    blocks = list(folder.rglob("blocks/*"))
    assert blocks
    for path in blocks:
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)


def check_files(root: Path):
    folders = set()
    for path in root.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        where = path.relative_to(root)
        assert mode == (0o700 if path.is_dir() else 0o600), where
        assert CANARY not in str(where).lower()
        assert OWNERS_CANARY not in str(where)
        if path.parent.name in FILES:
            assert FILES[path.parent.name].fullmatch(path.name), where
            folders.add(path.parent.name)
    assert folders >= {"blocks", "manifests"}
