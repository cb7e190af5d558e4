import json
import tracemalloc

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabric.errors import CorruptDataError
from fabric.kvcache.cache_spec import DTYPE_BYTES, TensorSpec
from fabric.kvcache.safetensors_header import LENGTH_BYTES, parse_header, render_header
from fabric.limits import FILE_ALIGN_BYTES, HEADER_BYTES_MAX

U8_PAIR = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
}

tensor_lists = st.lists(
    st.builds(
        TensorSpec,
        st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda n: n != "__metadata__"),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    max_size=6,
    unique_by=lambda tensor: tensor.name,
)
texts = st.text(st.characters(codec="utf-8"), max_size=12)


def raw(body: bytes | str | dict) -> bytes:
    if isinstance(body, dict):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    return len(body).to_bytes(8, "little") + body


def refuses(prefix: bytes, file_bytes: int) -> None:
    with pytest.raises(CorruptDataError):
        parse_header(prefix, file_bytes)


@settings(database=None)
@given(tensor_lists, st.dictionaries(texts, texts, max_size=4))
def test_rendered_header_parses_here_and_in_the_reference_library(tensors, metadata):
    header = render_header(tensors, metadata)
    data = bytes(sum(tensor.size_bytes for tensor in tensors))

    parsed = parse_header(header, len(header) + len(data))

    # Empty tensors share one offset, so only their set is certain.
    assert sorted(parsed.tensors, key=repr) == sorted(tensors, key=repr)
    assert [t for t in parsed.tensors if t.size_bytes] == [t for t in tensors if t.size_bytes]
    assert parsed.metadata == metadata
    assert parsed.data_start == len(header)
    assert len(header) % FILE_ALIGN_BYTES == 0
    opened = dict(safetensors.deserialize(header + data))
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in opened.items()} == {
        t.name: (t.dtype, t.shape) for t in tensors
    }


def test_header_alignment_is_configurable():
    assert len(render_header([], {}, align_bytes=64)) == 64


@pytest.mark.parametrize("extra", ["missing", "trailing"])
def test_data_of_wrong_length_is_rejected(extra):
    header = raw(U8_PAIR)
    refuses(header, len(header) + 8 + (1 if extra == "trailing" else -1))


def entry(**change) -> dict:
    return {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} | change}


HOSTILE = {
    "overlap": {**U8_PAIR, "b": {"dtype": "U8", "shape": [6], "data_offsets": [2, 8]}},
    "same bytes twice": {name: entry()["a"] for name in "ab"},
    "hole": {**U8_PAIR, "b": {"dtype": "U8", "shape": [3], "data_offsets": [5, 8]}},
    "hole at the start": entry(shape=[7], data_offsets=[1, 8]),
    "negative dims": entry(shape=[-8, -1]),
    "negative zero": '{"a":{"dtype":"U8","shape":[8],"data_offsets":[-0,8]}}',
    "wrapped dims": entry(shape=[(1 << 32) + 8]),
    "empty but huge": entry(shape=[1 << 30] * 3),
    "over 31 bits": entry(shape=[0, 1 << 31]),
    "too many dims": entry(shape=[1] * 8 + [8]),
    "shape and offsets disagree": entry(shape=[7]),
    "offsets backwards": entry(shape=[], data_offsets=[8, 0]),
    "one offset": entry(data_offsets=[8]),
    "three offsets": entry(data_offsets=[0, 4, 8]),
    "offsets as text": entry(data_offsets=["0", "8"]),
    "offsets as map": entry(data_offsets={"0": 8}),
    "float dim": entry(shape=[8.0]),
    "true as a dim": entry(shape=[8, True]),
    "null shape": entry(shape=None),
    "unknown dtype": entry(dtype="F64", shape=[1]),
    "dtype as list": entry(dtype=["U8"]),
    "extra field": entry(extra=1),
    "missing field": {"a": {"dtype": "U8", "shape": [8]}},
    "tensor as list": {"a": [1]},
    "metadata as list": {**entry(), "__metadata__": []},
    "metadata of numbers": {**entry(), "__metadata__": {"a": 1}},
    "metadata nested": {**entry(), "__metadata__": {"a": {}}},
    "duplicate tensor": "{%s,%s}" % ((json.dumps(entry())[1:-1],) * 2),
    "duplicate field": '{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "NaN": '{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}',
    "exponent": '{"a":{"dtype":"U8","shape":[8e0],"data_offsets":[0,8]}}',
    "huge digits": '{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,8]}}' % ("9" * 5000),
    "half a surrogate": '{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "raw surrogate": '{"\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "surrogate in metadata": '{"__metadata__":{"\\udfff":""}}',
    "array": "[]",
    "two objects": json.dumps(entry()) + "{}",
    "leading space": " " + json.dumps(entry()),
    "trailing tab": json.dumps(entry()) + "\t",
    "trailing NUL": json.dumps(entry()) + "\0",
    "comment": "{/**/}",
    "not UTF-8": b'{"\xff":1}',
    "empty": "",
    "deep": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep list": '{"a":' + "[" * 100_000 + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_rejected(name):
    header = raw(HOSTILE[name])
    refuses(header, len(header) + 8)


def test_unmodified_header_is_valid():
    header = raw(entry())
    assert parse_header(header, len(header) + 8).tensors == (TensorSpec("a", "U8", (8,)),)


def test_length_beyond_limit_file_or_prefix_is_rejected():
    header = raw(entry())
    for claim in (len(header), HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1, 1 << 63, (1 << 64) - 1):
        refuses(claim.to_bytes(8, "little") + header[8:], len(header) + 8)
    for cut in range(len(header)):
        refuses(header[:cut], len(header) + 8)
        refuses(header, cut)


def test_huge_declared_sizes_allocate_no_memory():
    shape = [1 << 20] * 2
    hostile = raw({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 1 << 42]}})

    tracemalloc.start()
    refuses(hostile, len(hostile))
    refuses((1 << 40).to_bytes(8, "little"), 1 << 41)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 256 * 1024


@settings(database=None, max_examples=300)
@given(st.data())
def test_accepted_headers_open_in_the_reference_library(data):
    """Every mutated header that our parser accepts is accepted by the reference implementation."""
    body = bytearray(json.dumps({"__metadata__": {"k": "v"}, **U8_PAIR}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete"]))
        if kind != "insert":
            del body[at]
        if kind != "delete":
            body.insert(at, data.draw(st.sampled_from(b'0123456789{}[]":, abU8\\u-.e\x00\xff')))
    header = raw(bytes(body))
    try:
        parse_header(header, len(header) + 8)
    except CorruptDataError:
        return
    assert len(safetensors.deserialize(header + bytes(8))) == 2


@settings(database=None)
@given(st.binary(max_size=200), st.integers(0, 300))
@example(b"", 0)
@example(bytes(LENGTH_BYTES), 8)
def test_random_bytes_are_rejected(noise, file_bytes):
    refuses(noise, file_bytes)
