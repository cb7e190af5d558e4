"""Names in bytes are not the code's: fields are renamed without a stored byte changing."""

from dataclasses import dataclass, field

import pytest

from fabric.codec import dump_json, from_plain, on_wire, pack, pack_fields, unpack
from fabric.errors import RejectedError


@dataclass(frozen=True, slots=True)
class Before:
    """What was stored."""

    count: int
    parts: tuple[int, ...]
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Renamed:
    """The same under better names."""

    tokens_count: int = field(metadata=on_wire("count"))
    pieces: tuple[int, ...] = field(metadata=on_wire("parts"))
    idle_since_s: float = field(default=0.0, metadata=on_wire("used_s"))


BEFORE, RENAMED = Before(3, (1, 2), 0.5), Renamed(3, (1, 2), 0.5)


def test_renamed_fields_keep_their_bytes() -> None:
    """Written and read under the old names, in every encoding."""
    assert pack(RENAMED) == pack(BEFORE)
    assert dump_json(RENAMED) == dump_json(BEFORE)
    packed = {"parts": [pack(1), pack(2)]}
    assert pack_fields(RENAMED, packed) == pack_fields(BEFORE, packed) == pack(BEFORE)
    assert unpack(Renamed, pack(BEFORE)) == RENAMED
    assert from_plain(Renamed, {"count": 3, "parts": [1, 2]}) == Renamed(3, (1, 2))


@pytest.mark.parametrize(
    "plain",
    [
        {"tokens_count": 3, "parts": []},
        {"count": 3, "parts": [], "idle_since_s": 0.5},
        {"parts": []},
        {"count": "3", "parts": []},
    ],
)
def test_the_codes_own_names_are_unknown_in_bytes(plain: dict[str, object]) -> None:
    """There is one spelling; errors name the one that the sender used."""
    with pytest.raises(RejectedError, match=r"count|idle_since_s"):
        from_plain(Renamed, plain)


def test_two_fields_of_one_name_are_a_mistake() -> None:
    """Found as soon as the type is used, not when a store cannot be read."""

    @dataclass(frozen=True, slots=True)
    class Twice:
        count: int
        number: int = field(default=0, metadata=on_wire("count"))

    with pytest.raises(AssertionError):
        pack(Twice(1))
