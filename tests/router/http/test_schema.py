"""A declaration reads what its JSON schema allows, refuses the rest, and names the parameter."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fabric.errors import RejectedError
from router.http.schema import (
    ArrayOf,
    Either,
    Flag,
    Integer,
    Number,
    ObjectOf,
    Tagged,
    Text,
    WordIn,
    as_sent,
    optional,
    param_path,
    required,
    words,
)
from tests.support.any_json import ANY_JSON


@dataclass(frozen=True, kw_only=True)
class Circle:
    radius: float = required(Number(0, 9))


@dataclass(frozen=True, kw_only=True)
class Square:
    side: int = required(Integer(1, 9))
    param: str = param_path()


@dataclass(frozen=True, kw_only=True)
class Drawing:
    title: str = required(Text(5, 1))
    shapes: list = optional(
        ArrayOf(
            Tagged(
                {"circle": ObjectOf(Circle), "square": ObjectOf(Square)}, "expected a shape, not {}"
            ),
            2,
        ),
        (),
    )
    unit: int = optional(WordIn({"mm": 1, "cm": 10}), 1, "of")
    note: str | bool | None = optional(Either({str: Text(), bool: Flag()}))
    sent: dict = as_sent()


@dataclass(frozen=True, kw_only=True)
class Place:
    city: str | None = optional(Text())
    x: int | None = optional(Integer(0, 9))
    y: int | None = optional(Integer(0, 9))
    kind: str | None = optional(words("home", "work"))


DRAWING = ObjectOf(Drawing)
PLACE = ObjectOf(
    Place, is_strict=True, one_of=(("city",), ("x", "y")), hint="name a city, or x and y"
)
VALIDATORS = {record.cls: Draft202012Validator(record.schema()) for record in (DRAWING, PLACE)}


def test_body_is_read_as_its_class():
    square = {"type": "square", "side": 2, "colour": "red"}
    sent = {"title": "t", "shapes": [{"type": "circle", "radius": 1}, square], "of": "cm", "x": 1}
    drawing = DRAWING.read(sent)

    assert drawing.shapes == [Circle(radius=1.0), Square(side=2, param="shapes[1]")]
    assert (drawing.unit, drawing.note, drawing.sent) == (10, None, sent)
    assert DRAWING.read({"title": "t", "of": None}).unit == 1, "null is the same as absent"


@pytest.mark.parametrize(
    ("record", "sent", "param", "message"),
    [
        (DRAWING, [], "", "expected an object, got an array"),
        (DRAWING, {}, "title", "Missing required parameter"),
        (DRAWING, {"title": ""}, "title", "it is empty"),
        (DRAWING, {"title": "too long"}, "title", "longer than 5 characters"),
        (DRAWING, {"title": "t", "of": "km"}, "of", "expected one of mm, cm"),
        (DRAWING, {"title": "t", "note": 3}, "note", "expected a boolean, got an integer"),
        (DRAWING, {"title": "t", "shapes": [{}]}, "shapes[0].type", "Missing"),
        (DRAWING, {"title": "t", "shapes": [{"type": "x"}]}, "shapes[0].type", "not 'x'"),
        (DRAWING, {"title": "t", "shapes": [{}] * 3}, "shapes", "more than 2 items"),
        (DRAWING, {"title": "t", "shapes": [{"type": "square", "side": True}]},
         "shapes[0].side", "expected an integer, got a boolean"),
        (PLACE, {"citi": "a"}, "citi", "did you mean 'city'"),
        (PLACE, {}, "", "name a city, or x and y"),
        (PLACE, {"x": 1}, "y", "Missing"),
        (PLACE, {"x": 1, "y": 2, "city": "a"}, "", "name a city"),
    ],
)  # fmt: skip
def test_invalid_value_is_named_in_error(record, sent, param, message):
    with pytest.raises(RejectedError, match=message) as caught:
        record.read(sent)
    assert caught.value.param == param


@given(
    st.sampled_from([DRAWING, PLACE]),
    st.dictionaries(
        st.sampled_from(["title", "shapes", "of", "note", "city", "x", "y", "kind"]),
        st.sampled_from([{"type": "circle", "radius": 2}, "mm", "home", 4, True, None, []])
        | ANY_JSON
        | st.lists(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["circle", "square"])},
                optional={"radius": ANY_JSON, "side": st.integers(0, 10)},
            ),
            max_size=3,
        ),
    ),
)
def test_reader_accepts_exactly_what_schema_allows(record, sent):
    try:
        record.read(sent)
    except RejectedError:
        is_read = False
    else:
        is_read = True

    # A JSON schema takes 1.0 for an integer.
    if "1.0" not in str(sent) and ".0" not in str(sent):
        assert is_read == VALIDATORS[record.cls].is_valid(sent)
