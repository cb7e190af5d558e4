"""Stored bytes equal the golden files.

A test that fails here says that stores, files or peers of the version before are not read any
more, or do not read ours: `docs/format.md`, "Versions", says what to do. If that is meant,
`python -m tests.formats.rewrite` writes the bytes anew.
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
    """Encode every sample as the code does now."""
    coded = {name: encode(value) for name, (value, encode, _) in CODED.items()}
    digests = {"handshake proof": handshake_proof(), "layout": layout_text(SPEC).encode()}
    return {**coded, **block_headers(), **digests}


def test_every_sample_has_golden_bytes() -> None:
    """Every sample has its bytes, and all bytes their sample."""
    assert current().keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", list(GOLDEN))
def test_encoded_bytes_equal_golden_bytes(name: str) -> None:
    """So that the version before reads them, too."""
    assert current()[name] == GOLDEN[name]


@pytest.mark.parametrize("name", list(CODED))
def test_golden_bytes_are_decoded(name: str) -> None:
    """Whatever is written now: a store must not be lost by an update."""
    value, _, decode = CODED[name]
    assert decode(GOLDEN[name]) == value


def test_tombstone_set_fingerprint_is_unchanged() -> None:
    """Nodes and routers compare these numbers, also with those that are not updated yet."""
    known = Tombstones()
    known.merge([TOMBSTONE])
    assert known.fingerprint == 3_654_547_112_704_244
