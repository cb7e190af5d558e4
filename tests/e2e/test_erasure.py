"""After an acknowledged erasure no file on any node contains the agent, and no log names it."""

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fabric.errors import CorruptDataError
from fabric.kvcache.hashing import agent_digest
from fabric.record.manifest import decode_manifest
from node.store.block_files import file_name
from node.store.encrypted_disk import open_disk
from node.store.tombstones import DIRECTORY as ERASED
from tests.support.local_fabric import local_fabric
from tests.support.samples import sample
from tests.support.services import KEY, TENANT
from tests.support.tiny_models import LLAMA, write_model

ALICE, BOB = "alice.canary@example.com", "bob.canary@example.com"
CANARY = "xylographiccanary"
OURS = ("node", "fabric", "router", "macfabric", "uvicorn", "aiohttp", "asyncio", "starlette")
GIB = 1 << 30
SHARED = "You keep vault codes for everybody who asks you politely and in good time. " * 20


@dataclass
class DiskContents:
    """Contents of the disks: block names by agent, and all decrypted bytes."""

    records: dict[str, list[str]] = field(default_factory=dict)  # block names, by agent
    contents: dict[Path, bytes] = field(default_factory=dict)


def read_disks(folder: Path) -> DiskContents:
    """Read every file of every model's folder as its node does, decrypting it if necessary."""
    found = DiskContents()
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError, IsADirectoryError):  # a copy may be refreshed meanwhile
            found.contents[path] = path.read_bytes()
    for root in {
        path.parent.parent for path in found.contents if len(path.parent.parent.name) == 16
    }:
        disk = open_disk(root, "none", KEY, keeps_modes=True)
        for directory in ("blocks", "manifests", "quarantine"):
            for leaf in disk.list_names(directory):
                try:
                    raw = disk.read(f"{directory}/{leaf}", GIB)
                except (CorruptDataError, FileNotFoundError):
                    continue  # damaged on purpose: its plain bytes are kept above
                found.contents[root / directory / leaf] = raw
                if directory == "manifests":
                    record = decode_manifest(raw)
                    names = found.records.setdefault(record.agent, [])
                    names += [Path(file_name(ref)).name for ref in record.refs]
        disk.close()
    return found


def user(text):
    return {"role": "user", "content": text}


def chat_turn(fabric, messages, agent):
    answer = fabric.chat(messages, agent, max_tokens=16)
    return [*messages, {"role": "assistant", "content": answer.text}], answer


def damage(path: Path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("encrypt_at_rest", sample([False, True], True))
def test_erased_agent_leaves_nothing_on_any_disk(
    tmp_path, tmp_path_factory, caplog, capfd, encrypt_at_rest
):
    caplog.set_level(logging.DEBUG)
    older = write_model(tmp_path_factory.mktemp("older"), LLAMA | {"num_hidden_layers": 2})
    # Written without encryption, by a model that is not served any more.
    with local_fabric(tmp_path, str(older), "left", "right") as fabric:
        for agent in (ALICE, BOB):
            chat_turn(fabric, [user(f"{SHARED} I am {agent}.")], agent)
            (home,) = {a["owner"] for a in fabric.http.get("/v1/agents").json()["data"]} & {
                "left"
            } or {"right"}
            other = "right" if home == "left" else "left"
            fabric.http.post(f"/v1/agents/{agent}/replicate", json={"to": other})
    options = {"encrypt_at_rest": encrypt_at_rest}
    with local_fabric(tmp_path, "recall", "left", "right", **options) as fabric:
        talks = {agent: [user(f"{SHARED} I am {agent}.")] for agent in (ALICE, BOB)}
        talks[ALICE][0]["content"] += f" The vault code of {CANARY} is otter quartz."
        for agent in (BOB, ALICE):
            talks[agent], answer = chat_turn(fabric, talks[agent], agent)
        home = answer.node
        other = "right" if home == "left" else "left"
        replicated = fabric.http.post(f"/v1/agents/{ALICE}/replicate", json={"to": other})
        for target in (other, home, other):  # from whichever node has it
            fabric.http.post(f"/v1/agents/{ALICE}/migrate", json={"to": target})
            talks[ALICE] = [*talks[ALICE], user(f"{CANARY} at {target}")]
            talks[ALICE], answer = chat_turn(fabric, talks[ALICE], ALICE)
        before = read_disks(tmp_path)
        for path in (tmp_path / other).glob("*/blocks/*"):
            damage(path)
        fabric.drop_hot()
        talks[ALICE], answer = chat_turn(fabric, [*talks[ALICE], user("once more")], ALICE)
        quarantined = list(tmp_path.glob("*/*/quarantine/*"))
        with_damage = read_disks(tmp_path)
        receipt = fabric.http.delete(f"/v1/agents/{ALICE}").json()
        after = read_disks(tmp_path)
        again = fabric.http.get(f"/v1/agents/{ALICE}")
        listed = [agent["id"] for agent in fabric.http.get("/v1/agents").json()["data"]]
        kept = chat_turn(fabric, [*talks[BOB], user("and now?")], BOB)[1]
    with local_fabric(tmp_path, "recall", "left", "right", **options) as fabric:
        restarted_answer = chat_turn(fabric, [user(f"The vault code of {CANARY} is")], ALICE)[1]

    assert replicated.status_code == 200
    assert quarantined, "no damaged block was read"
    assert receipt["deleted"] is True
    assert sorted(receipt["remembered"]) == ["left", "right"]
    assert sum(part["other_models"]["records"] for part in receipt["receipts"]) == 2
    assert again.status_code == 404
    assert listed == [BOB]
    assert kept.cached_tokens > 0
    assert restarted_answer.match == "none"
    assert CANARY in "".join(map(str, talks[ALICE]))
    check_erased(after, before, with_damage)
    logged = [r.getMessage() + str(r.exc_text) for r in caplog.records if r.name.startswith(OURS)]
    assert any("moves from" in line for line in logged)
    for text in (*logged, *capfd.readouterr()):
        assert ALICE not in text
        assert CANARY not in text.lower()


def check_erased(after: DiskContents, *before: DiskContents):
    """Fail if a record, an unshared block, or any text of the erased agent is left."""
    alice_blocks = {name for found in before for name in found.records[ALICE]}
    needed = set(after.records[BOB])
    assert alice_blocks - needed, "alice had no blocks of her own"
    assert set(after.records) == {BOB}
    # The reason of a quarantine follows the file's name.
    stored = {".".join(path.name.split(".")[:2]) for path in after.contents}
    assert stored & alice_blocks <= needed
    digest = agent_digest(KEY, TENANT, ALICE)
    assert any(digest in path.name for found in before for path in found.contents)
    for path, raw in after.contents.items():
        assert path.parent.parent.name == ERASED or digest not in path.name, path
        assert CANARY.encode() not in raw.lower(), path
        assert ALICE.encode() not in raw, path
