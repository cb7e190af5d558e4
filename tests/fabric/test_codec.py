"""Names in bytes are independent of the code's: renaming a field changes no stored byte."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import pytest

from fabric.codec import dump_json, from_plain, on_wire, pack, pack_fields, unpack
from fabric.errors import RejectedError


@dataclass(frozen=True, slots=True)
class Before:
    """The stored type."""

    count: int
    parts: tuple[int, ...]
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Renamed:
    """The same type with renamed fields."""

    tokens_count: int = field(metadata=on_wire("count"))
    pieces: tuple[int, ...] = field(metadata=on_wire("parts"))
    idle_since_s: float = field(default=0.0, metadata=on_wire("used_s"))


BEFORE, RENAMED = Before(3, (1, 2), 0.5), Renamed(3, (1, 2), 0.5)


def test_renamed_fields_keep_their_bytes() -> None:
    """Fields are written and read under the old names in every encoding."""
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
def test_python_field_names_are_rejected_in_bytes(plain: dict[str, object]) -> None:
    """Only the name in bytes is accepted; errors quote the sender's name."""
    with pytest.raises(RejectedError, match=r"count|idle_since_s"):
        from_plain(Renamed, plain)


def test_duplicate_wire_name_is_rejected() -> None:
    """The error is raised when the type is first used, not when a store cannot be read."""

    @dataclass(frozen=True, slots=True)
    class Twice:
        count: int
        number: int = field(default=0, metadata=on_wire("count"))

    with pytest.raises(AssertionError):
        pack(Twice(1))


class Level(IntEnum):
    """Enum of numbers."""

    LOW = 0
    HIGH = 1


class Color(StrEnum):
    """Enum of words."""

    RED = "red"


@dataclass(frozen=True, slots=True)
class Chosen:
    """One of each."""

    level: Level
    color: Color = Color.RED


def test_enum_is_decoded_by_value() -> None:
    """A decoded value is a member of the enum."""
    assert unpack(Chosen, pack(Chosen(Level.HIGH))) == Chosen(Level.HIGH)


@pytest.mark.parametrize("level", [True, False, 1.0, 0.0, "1", 2, None, [], {}])
def test_values_equal_to_an_enum_but_of_other_type_are_rejected(level: object) -> None:
    """In Python, True and 1.0 equal 1."""
    with pytest.raises(RejectedError, match="level"):
        from_plain(Chosen, {"level": level})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_number_is_rejected(number):
    """A NaN for one node's queue seconds would make every comparison of nodes false."""

    @dataclass(frozen=True, slots=True)
    class Load:
        queue_s: float
        rate: float | None = None

    with pytest.raises(RejectedError, match="queue_s: expected a finite number"):
        unpack(Load, pack(Load(number)), 1024)
    with pytest.raises(RejectedError, match="rate: expected a finite number"):
        unpack(Load, pack(Load(0.0, number)), 1024)
