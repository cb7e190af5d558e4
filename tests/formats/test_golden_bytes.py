"""Stored bytes equal the golden files.

A failure here means that this version cannot read stores, files or messages of the version before,
or that version cannot read ours: see `docs/format.md`, "Versions". If the change is intended,
`python -m tests.formats.rewrite` rewrites the bytes.
"""

import json
from pathlib import Path

import pytest

from fabric.kvcache.fingerprint import layout_text
from fabric.record.tombstone import Tombstones
from tests.formats.samples import CODED, SPEC, TOMBSTONE, block_headers, handshake_proof

PATH = Path(__file__).with_name("golden_bytes.json")
GOLDEN = {name: bytes.fromhex(text) for name, text in json.loads(PATH.read_text()).items()}


def current() -> dict[str, bytes]:
    """Encode every sample with the present code."""
    coded = {name: encode(value) for name, (value, encode, _) in CODED.items()}
    digests = {"handshake proof": handshake_proof(), "layout": layout_text(SPEC).encode()}
    return {**coded, **block_headers(), **digests}


def test_every_sample_has_golden_bytes() -> None:
    """Samples and golden files have the same names."""
    assert current().keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", list(GOLDEN))
def test_encoded_bytes_equal_golden_bytes(name: str) -> None:
    """The version before can read the bytes, too."""
    assert current()[name] == GOLDEN[name]


@pytest.mark.parametrize("name", list(CODED))
def test_golden_bytes_are_decoded(name: str) -> None:
    """Golden bytes stay readable when new ones are written: an update must not lose a store."""
    value, _, decode = CODED[name]
    assert decode(GOLDEN[name]) == value


def test_tombstone_set_fingerprint_is_unchanged() -> None:
    """Nodes and routers compare these numbers, also with peers that are not updated yet."""
    tombstones = Tombstones()
    tombstones.merge([TOMBSTONE])
    assert tombstones.fingerprint == 3_654_547_112_704_244
