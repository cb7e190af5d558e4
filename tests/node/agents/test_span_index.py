"""An index of chunks to the records that hold them, filled as records are read, and bounded."""

from dataclasses import dataclass

from node.agents.span_index import Chunk, SpanIndex
from node.limits import SPAN_INDEXED_TOKENS_MAX, SPAN_PLACES_MAX


@dataclass(eq=False)
class Record:
    """The fields of a record that the index reads."""

    name: str
    tokens_count: int = 100

    @property
    def key(self):
        return "tenant", self.name


def chunks_of(*digests):
    return [Chunk(20 * at, 20 * at + 20, digest) for at, digest in enumerate(digests)]


def add_record(index, name, *digests):
    record = Record(name)
    index.note(record.key, record)
    index.put(record, chunks_of(*digests))
    return record


def test_records_are_read_once_newest_first():
    index = SpanIndex()
    records = [Record(str(number)) for number in range(3)]
    for record in records:
        index.note(record.key, record)
    assert index.unread() == records[::-1]
    index.put(records[1], chunks_of(b"a"))
    assert index.unread() == [records[2], records[0]]
    long = Record("long", SPAN_INDEXED_TOKENS_MAX)
    index.note(long.key, long)
    assert index.unread() == [long]


def test_changed_record_is_read_again():
    index = SpanIndex()
    old, new = Record("a"), Record("a")
    index.note(old.key, old)
    index.note(new.key, new)
    index.put(old, chunks_of(b"a"))
    assert index.places(b"a") == ()
    assert index.unread() == [new]
    index.put(new, chunks_of(b"b", b"a"))
    assert index.places(b"a") == ((new.key, 20),)


def test_removed_record_leaves_the_index():
    index = SpanIndex()
    record = add_record(index, "a", b"a", b"a", b"b")
    index.remove(record.key)
    assert len(index) == 0
    assert index.places(b"a") == index.places(b"b") == ()
    index.put(record, chunks_of(b"a"))
    assert len(index) == 0
    index.note(record.key, record)
    index.note(record.key, None)
    assert index.unread() == []


def test_places_of_a_chunk_are_bounded_and_newest_first():
    index = SpanIndex()
    names = [str(number) for number in range(SPAN_PLACES_MAX + 2)]
    for name in names:
        add_record(index, name, b"a")
    found = [key[1] for key, _ in index.places(b"a")]
    assert found == names[::-1][:SPAN_PLACES_MAX]
    for name in names:
        index.remove(("tenant", name))
    assert not index._places


def test_oldest_records_are_dropped_beyond_chunk_limit():
    index = SpanIndex(chunks_max=3)
    add_record(index, "a", b"a", b"b")
    add_record(index, "b", b"c")
    assert len(index) == 3
    add_record(index, "c", b"d")
    assert len(index) == 2
    assert index.places(b"a") == ()
    assert index.places(b"c")
    add_record(index, "long", *(bytes([number]) for number in range(9)))
    assert len(index) == 3
