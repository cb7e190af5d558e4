"""docs/format.md agrees with the code: names, constants, fields and the example header."""

import json
import re
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

import safetensors
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128

from fabric import limits
from fabric.codec import wire_name
from fabric.keys import CLUSTER_KEY as CLUSTER_KEY_FILE
from fabric.kvcache.block_chain import BlockRef, EditLineage, block_spans
from fabric.kvcache.block_file import VERSION, payload_tensors, render_block_header
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import agent_digest, payload_checksum
from fabric.kvcache.safetensors_header import DIM_MAX, DIMS_MAX, parse_header
from fabric.record import manifest, spec_file
from node.store import (
    block_files,
    encrypted_disk,
    encrypted_file,
    folder_format,
    manifest_store,
    posix_disk,
)
from tests.support.blocks import (
    CLUSTER_KEY,
    FINGERPRINT,
    MIXED,
    SALT,
    TENANT,
    make_block,
    make_spec,
)

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "format.md").read_text()
FLAT = " ".join(TEXT.split())


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title: str, table: int = 0) -> list[str]:
    """List the first column of a section's table, by rows."""
    tables = re.findall(r"^\|[^\n]*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", section(title), re.MULTILINE)
    return [row.split("|")[1].strip() for row in tables[table].splitlines()]


def names_in(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_documented_example_equals_rendered_header():
    block = make_block(1, 3)
    assert list(block.tokens) == list(
        map(int, re.search(r"tokens ([\d, \n]+) it", TEXT)[1].split(","))
    )
    raw = render_block_header(make_spec(), FINGERPRINT, block.parent, block.ref.block_hash, 3)
    [example] = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)

    assert json.loads(example) == json.loads(raw[8:])
    assert list(json.loads(example)) == list(json.loads(raw[8:]))
    assert len(raw) % 16_384 == 0
    opened = dict(safetensors.deserialize(raw + block.payload))
    assert bytes(opened["tokens"]["data"]) == block.payload[-12:]


def test_manifest_table_names_every_field():
    named = names_in(first_cells("Manifests"))
    assert sorted(named) == sorted(wire_name(field) for field in fields(manifest.Manifest))
    sentence = re.search(r"A block is referred to as (.*?)\. A manifest", FLAT)[1]
    assert re.findall(r"`(\w+)`", sentence) == [field.name for field in fields(BlockRef)]
    assert names_in(first_cells("Block files")) == [group.value for group in CacheGroup]
    for state in manifest.OwnerState:
        assert f"`{state.value}`" in section("Manifests")


def test_tensor_names_and_order_match_the_document():
    patterns = [re.sub(r"[NI]\b", r"\\d+", n).replace("SLOT", r"(?:keys|values|index)")
                for n in names_in(first_cells("Block files", 1))]  # fmt: skip
    for group in CacheGroup:
        names = [tensor.name for tensor in payload_tensors(MIXED, 3, group)]
        assert all(any(re.fullmatch(p, name) for p in patterns) for name in names), names
        assert names[-1] == "tokens"


def test_file_names_match_the_document():
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", section("The folder"), re.MULTILINE))
    for group in CacheGroup:
        ref = make_block(1, 3, MIXED, group=group).ref
        assert re.fullmatch(
            rf"blocks/[0-9a-f]{{64}}-[0-9a-f]{{32}}\.{group}", block_files.file_name(ref)
        )
        assert f"`{group}`" in rows["block"]
    assert rows["manifest"].endswith(".mf`")
    assert re.fullmatch(r"[0-9a-f]{32}", agent_digest(CLUSTER_KEY, TENANT, "alice"))
    assert rows["spec"] == f"`{folder_format.SPEC_FILE}`"
    assert rows["unfinished"].startswith(f"`{posix_disk.TEMPORARY}")
    for directory in (block_files.DIRECTORY, manifest_store.DIRECTORY, posix_disk.QUARANTINE):
        assert f"/{directory}/…" in TEXT
    assert f"DIR/{CLUSTER_KEY_FILE} " in TEXT


def test_digests_match_the_document():
    """Compute the digests by the table's recipes."""
    block = make_block(1, 3, MIXED)
    tokens = b"".join(token.to_bytes(4, "little") for token in block.tokens)
    salt = blake2b(TENANT.encode(), digest_size=32, key=CLUSTER_KEY, person=b"mf-tenant").digest()
    body = bytes(32) + FINGERPRINT + (3).to_bytes(4, "little") + tokens
    name = blake2b(body, digest_size=32, key=salt, person=b"mf-block-v1").digest()
    assert (salt, name) == (SALT, block.ref.block_hash)
    for group in (CacheGroup.WINDOW, CacheGroup.STATE):
        person = f"mf-{group}".encode()
        other = blake2b(name, digest_size=32, key=salt, person=person).digest()
        assert other == make_block(1, 3, MIXED, group=group).ref.block_hash
        assert f"`mf-{group}`" in TEXT
    agent = blake2b(b"7:defaultalice", digest_size=16, key=CLUSTER_KEY, person=b"mf-agent")
    assert agent.hexdigest() == agent_digest(CLUSTER_KEY, TENANT, "alice")
    assert payload_checksum([b"x"]) == xxh3_128(b"x").digest()
    lineage = EditLineage(2, b"e" * 32)
    [edited] = block_spans(SALT, FINGERPRINT, block.tokens, lineage=lineage)
    parent = blake2b(bytes(32) + b"e" * 32, digest_size=32, key=salt, person=b"mf-edited-v1")
    assert edited.parent == parent.digest()
    for person in ("mf-tenant", "mf-block-v1", "mf-edited-v1", "mf-agent"):
        assert f"`{person}`" in TEXT


def test_documented_constants_equal_those_of_the_code():
    for sentence in (
        f"{manifest.MAGIC.decode()} | xxh3-128",
        f"{spec_file.MAGIC.decode()} | xxh3-128",
        f"for 1 to {limits.BLOCK_TOKENS} tokens that begin at a multiple of {limits.BLOCK_TOKENS}",
        f"multiple of {limits.FILE_ALIGN_BYTES:,} bytes",
        f"at most {limits.MANIFEST_BYTES_MAX // limits.MIB} MiB. It is a piece table",
        f"cover all tokens in order, at most {limits.PIECES_MAX:,};",
        f"at most {limits.SPEC_BYTES_MAX // limits.MIB} MiB. Nodes never read it",
        f"JSON part of at most {limits.HEADER_BYTES_MAX // limits.MIB} MiB",
        f"at most {DIMS_MAX} dimensions of at most 2^31 - 1",
        f"Version {VERSION} of every format",
        f"the newest {posix_disk.QUARANTINE_FILES_MAX}, because",
    ):
        assert sentence in FLAT, sentence
    assert DIM_MAX == 2**31 - 1
    magics = {manifest.MAGIC[-2:], spec_file.MAGIC[-2:], VERSION.zfill(2).encode()}
    assert len(magics) == 1


def test_encrypted_files_match_the_document(tmp_path):
    """Decrypt files by the document's recipe alone."""
    text = " ".join(section("Encrypted at rest").split())
    chunk_bytes = encrypted_file.CHUNK_BYTES
    assert f"MFSEAL01 | salt {encrypted_file.SALT_BYTES} bytes" in text
    assert f"chunks of {chunk_bytes:,} bytes, each AES-256-GCM with its 16-byte tag" in text
    assert f"FINGERPRINT16/{encrypted_disk.MARKER} " in TEXT
    plain = bytes(range(256)) * 300
    disk = encrypted_disk.open_disk(tmp_path / "root", "none", CLUSTER_KEY, encrypts=True)
    disk.publish("x", [plain])
    disk.close()

    raw = (tmp_path / "root" / "x").read_bytes()
    magic, salt, body = raw[:8], raw[8:40], raw[40:]
    key = blake2b(digest_size=32, key=CLUSTER_KEY, person=b"mf-at-rest").digest()
    of_file = blake2b(salt, digest_size=32, key=key, person=b"mf-at-rest-file").digest()
    chunks = body[: chunk_bytes + 16], body[chunk_bytes + 16 :]
    opened = [
        AESGCM(of_file).decrypt(index.to_bytes(11, "big") + bytes([index]), chunk, None)
        for index, chunk in enumerate(chunks)  # the second chunk is the last
    ]
    assert (magic, b"".join(opened)) == (b"MFSEAL01", plain)


def test_document_lists_spec_fields_and_recovery_steps():
    listed = re.search(r"msgpack map: ([\w, ]+)\n", section("The spec"))[1]
    assert listed.split(", ") == [field.name for field in fields(spec_file.SpecRecord)]
    assert len(re.findall(r"^\d\. ", section("Recovery"), re.MULTILINE)) == 7


def test_block_files_open_with_the_strict_parser():
    for group in CacheGroup:
        block = make_block(1, 7, MIXED, group=group)
        raw = render_block_header(MIXED, FINGERPRINT, block.parent, block.ref.block_hash, 7, group)
        header = parse_header(raw, len(raw) + len(block.payload))
        assert header.metadata["group"] == group.value
        assert header.tensors == payload_tensors(MIXED, 7, group)
