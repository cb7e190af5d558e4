from dataclasses import dataclass

import pytest

from fabric.codec import pack
from fabric.errors import CorruptDataError
from fabric.record.envelope import Envelope


@dataclass(frozen=True, slots=True)
class Note:
    text: str


NOTES = Envelope(Note, "note", b"MFNOTE01", 64)
RAW = NOTES.seal(pack(Note("hello")))


def test_envelope_round_trips():
    assert RAW.startswith(b"MFNOTE01")
    assert NOTES.open(RAW) == Note("hello")
    assert Envelope(Note, "note", b"", 64).open(RAW[8:]) == Note("hello")


def test_every_changed_or_missing_byte_is_detected():
    for at in range(len(RAW)):
        damaged = bytearray(RAW)
        damaged[at] ^= 1
        with pytest.raises(CorruptDataError, match=r"not a note|note's checksum"):
            NOTES.open(bytes(damaged))
        with pytest.raises(CorruptDataError):
            NOTES.open(RAW[:at])


def test_foreign_and_oversized_records_with_valid_checksums_are_rejected():
    for body in (pack({"text": 1}), pack({"words": "hello"}), b"\xc1", b""):
        with pytest.raises(CorruptDataError, match="note does not decode"):
            NOTES.open(NOTES.seal(body))
    long = NOTES.seal(pack(Note("x" * 64)))
    with pytest.raises(CorruptDataError, match="not a note of this version"):
        NOTES.open(long)
    assert Envelope(Note, "note", b"MFNOTE01", len(long)).open(long) == Note("x" * 64)
