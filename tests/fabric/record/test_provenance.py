from dataclasses import replace

import pytest

from fabric.codec import pack, unpack_plain
from fabric.errors import CorruptDataError
from fabric.ids import NodeName
from fabric.record.envelope import Envelope
from fabric.record.manifest import MAGIC, Manifest, decode_manifest, encode_manifest
from fabric.record.provenance import LastServed, Provenance, TruncatedBy
from fabric.record.rekey import with_new_owner
from fabric.turn.prompt_plan import PromptMarks
from tests.support.blocks import make_block, make_manifest

SERVED = LastServed(NodeName("node-a"), 17)
# Written so since the first version, which reads only a map of texts.
NOTES = [
    ({}, Provenance()),
    ({"served": "node-a:17"}, Provenance(served=SERVED)),
    ({"copied": "3", "kept": "yes"}, Provenance(copied_revision=3, is_kept=True)),
    ({"copied": "0"}, Provenance(copied_revision=0)),
    ({"fork": "yes", "served": "node-a:17"}, Provenance(SERVED, is_fork=True)),
    ({"cut": "fsck"}, Provenance(truncated_by=TruncatedBy.FSCK)),
    ({"cut": "hibernated"}, Provenance(truncated_by=TruncatedBy.HIBERNATED)),
    (
        {"head": "7", "asked": "9", "conversation": "12"},
        Provenance(marks=PromptMarks(head=7, question=9, conversation=12)),
    ),
    ({"cut": "cancelled"}, Provenance(truncated_by=TruncatedBy.CANCELLED)),
    ({"answers": "[]"}, Provenance(answers="[]")),
]
RECORD = make_manifest([make_block(1, 3)])
LEAD = len(MAGIC) + 16


@pytest.mark.parametrize(("notes", "provenance"), NOTES)
def test_provenance_keeps_its_encoding_and_round_trips(notes, provenance):
    raw = encode_manifest(replace(RECORD, provenance=provenance))

    assert unpack_plain(raw[LEAD:])["extras"] == notes
    assert decode_manifest(raw).provenance == provenance


@pytest.mark.parametrize(
    ("notes", "provenance"),
    [
        ({"k": "v", "served": "node-a:17"}, Provenance(served=SERVED)),
        ({"copied": "", "served": ""}, Provenance()),
        ({"copied": "-1", "served": "node-a:x"}, Provenance()),
        ({"copied": "\u0663", "served": "Not a name:5"}, Provenance()),
        ({"copied": "9" * 5_000, "served": "node-a:" + "9" * 5_000}, Provenance()),
        ({"head": "x", "asked": "", "conversation": "-1"}, Provenance()),
        ({"cut": "by somebody"}, Provenance(truncated_by=TruncatedBy.FSCK)),
        ({"cut": "", "fork": "", "kept": ""}, Provenance(None, None, True, True, TruncatedBy.FSCK)),
    ],
    ids=[
        "unknown",
        "empty",
        "no numbers",
        "other digits",
        "endless",
        "no marks",
        "unknown cut",
        "no words",
    ],
)
def test_unknown_notes_are_ignored_but_truncation_is_preserved(notes, provenance):
    plain = unpack_plain(encode_manifest(RECORD)[LEAD:]) | {"extras": notes}
    record = decode_manifest(Envelope(Manifest, "", MAGIC, 1 << 20).seal(pack(plain)))

    assert record.provenance == provenance
    assert replace(record, provenance=Provenance()) == RECORD


@pytest.mark.parametrize("notes", [None, [], {"kept": True}, {"served": 5}, "cut"])
def test_notes_other_than_texts_are_rejected(notes):
    plain = unpack_plain(encode_manifest(RECORD)[LEAD:]) | {"extras": notes}
    raw = Envelope(Manifest, "", MAGIC, 1 << 20).seal(pack(plain))
    with pytest.raises(CorruptDataError, match=r"does not decode: message\.extras"):
        decode_manifest(raw)


def test_cut_records_and_forks_are_not_found_by_content():
    def is_found(**notes):
        return replace(RECORD, provenance=Provenance(**notes)).is_found_by_content

    assert is_found(served=SERVED, copied_revision=3, is_kept=True)
    assert not is_found(is_fork=True)
    assert not is_found(truncated_by=TruncatedBy.HIBERNATED)


def test_only_answers_move_to_a_new_owner():
    own = replace(RECORD, provenance=Provenance(SERVED, answers="[]", is_kept=True))
    anew = with_new_owner(own, own.key, NodeName("node-b"), 7, 1.0)
    assert anew.provenance == Provenance(answers="[]")
