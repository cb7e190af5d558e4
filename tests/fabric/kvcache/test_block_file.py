import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import CorruptDataError
from fabric.ids import BlockHash
from fabric.kvcache.block_file import (
    TOKENS_TENSOR,
    parse_parent,
    payload_bytes,
    payload_tensors,
    render_block_header,
    tokens_by_file_bytes,
)
from fabric.kvcache.hashing import token_bytes
from fabric.kvcache.safetensors_header import parse_header
from fabric.limits import BLOCK_TOKENS, FILE_ALIGN_BYTES
from tests.support.blocks import FINGERPRINT, SPEC, make_block, make_spec

PARENT = BlockHash(b"\xab" * 32)
BLOCK = BlockHash(b"b" * 32)


def header_of(spec=SPEC, tokens_count=2, parent=PARENT, block=BLOCK) -> bytes:
    return render_block_header(spec, FINGERPRINT, parent, block, tokens_count)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("tokens_count", [1, 17, 256])
def test_file_opens_with_the_stock_library(dtype, tokens_count):
    spec = make_spec(layers=2, heads=3, width=128, dtype=dtype)
    block = make_block(7, tokens_count, spec)
    header = header_of(spec, tokens_count)

    opened = safetensors.deserialize(header + block.payload)

    contents = {name: bytes(tensor["data"]) for name, tensor in opened}
    shapes = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in opened}
    tensors = payload_tensors(spec, tokens_count)
    assert {t.name: (t.dtype, t.shape) for t in tensors} == shapes
    assert b"".join(contents[tensor.name] for tensor in tensors) == block.payload
    assert contents[TOKENS_TENSOR] == token_bytes(block.tokens)


def test_metadata_identifies_the_block(tmp_path):
    path = tmp_path / "block.safetensors"
    path.write_bytes(header_of() + make_block(1).payload)
    with safetensors.safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata()
        tokens = opened.get_tensor(TOKENS_TENSOR)

    assert metadata == {
        "format": "macfabric-block",
        "version": "1",
        "group": "full",
        "fingerprint": FINGERPRINT.hex(),
        "parent": PARENT.hex(),
        "block_hash": BLOCK.hex(),
    }
    assert tuple(tokens) == make_block(1).tokens


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_file_opens_in_mlx(tmp_path, dtype):
    mx = pytest.importorskip("mlx.core")
    spec = make_spec(layers=1, heads=2, dtype=dtype)
    block = make_block(3, 5, spec)
    path = tmp_path / "block.safetensors"
    path.write_bytes(header_of(spec, 5) + block.payload)

    arrays = mx.load(str(path))

    assert arrays["layers.0.keys.scales"].dtype == {"F16": mx.float16, "BF16": mx.bfloat16}[dtype]
    codes = np.array(arrays["layers.0.keys.codes"])
    assert codes.shape == (2, 5, 8)
    assert codes.tobytes() == block.kv[: codes.nbytes]


@settings(database=None, max_examples=50)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([64, 128]),
    st.sampled_from(["F16", "BF16", "F32"]),
    st.integers(1, BLOCK_TOKENS),
)
def test_layout_holds_for_every_shape(layers, heads, width, dtype, tokens_count):
    spec = make_spec(layers, heads, width, dtype)
    header = header_of(spec, tokens_count)
    size = payload_bytes(spec, tokens_count)

    parsed = parse_header(header, len(header) + size)

    assert parsed.tensors == payload_tensors(spec, tokens_count)
    assert len(header) % FILE_ALIGN_BYTES == 0
    assert size == spec.kv_bytes(tokens_count) + 4 * tokens_count
    assert parse_parent(header, spec, FINGERPRINT, BLOCK, tokens_count) == PARENT


def test_header_depends_on_its_arguments_only():
    seen = {
        header_of(),
        header_of(parent=BLOCK),
        header_of(block=PARENT),
        header_of(tokens_count=3),
        header_of(make_spec(dtype="BF16")),
    }
    assert len(seen) == 5
    assert header_of() == header_of()


def test_file_length_determines_token_count():
    sizes = tokens_by_file_bytes(SPEC)
    assert sorted(sizes.values()) == list(range(1, BLOCK_TOKENS + 1))
    for size, count in sizes.items():
        assert size == len(header_of(tokens_count=count)) + payload_bytes(SPEC, count)


def test_foreign_headers_have_no_parent():
    other = make_spec(dtype="BF16")
    for header in (
        header_of(block=PARENT),
        header_of(tokens_count=3),
        header_of(other),
        render_block_header(SPEC, BLOCK, PARENT, BLOCK, 2),
        header_of().replace(PARENT.hex().encode(), b"x" * 64),
        header_of().replace(PARENT.hex().encode(), PARENT.hex().upper().encode()),
        header_of().replace(b'"parent"', b'"tnerap"'),
        header_of().replace(b'"version":"1"', b'"version":"2"'),
        b"",
    ):
        with pytest.raises(CorruptDataError):
            parse_parent(header, SPEC, FINGERPRINT, BLOCK, 2)
