"""Bodies to bytes and back; what does not decode is told by its place, never by its value."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given, strategies as st

from reliq.codec.codec import Codec
from reliq.errors import BodyError, ConfigurationError, UndecodableError

SECRET = "hunter2-s3cret"


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    sku: str
    count: int = 1


@dataclass
class Order:
    id: int
    lines: list[Line] = field(default_factory=list)
    colour: Colour = Colour.RED
    kind: Literal["new", "old"] = "new"
    paid: datetime | None = None


class Mail(TypedDict):
    to: str
    cc: list[str]


class Point(msgspec.Struct):
    x: float
    y: float


class Card(pydantic.BaseModel):
    number: int
    owner: str = "nobody"
    limits: dict[str, int] = {}
    kind: Literal["debit", "credit"] = "debit"


@dataclass
class Picky:
    age: int

    def __post_init__(self):
        if self.age < 0:
            raise LookupError(f"{SECRET} {self.age}")


BODIES = [
    (Order, Order(7, [Line("a", 2)], paid=datetime(2026, 1, 2, tzinfo=UTC))),
    (Mail, {"to": "a@example.com", "cc": []}),
    (Point, Point(1.5, -2.0)),
    (Card, Card(number=4, limits={"day": 3})),
    (dict, {"a": [1, None, "ü", 1.5, True]}),
    (list, [1, "a", None]),
    (int, -3),
    (float, 3),
    (bool, True),
    (bytes, b"RELIQ/1 {}\n"),
    (UUID, UUID(int=5)),
    (int | None, None),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=str)
def test_body_is_decoded_as_it_was_encoded(kind, body):
    codec = Codec(kind)
    back = codec.decode(codec.encode(body))

    assert back == body
    assert type(back) is (float if kind is float else type(body))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_any_json_object_is_decoded_as_it_was_encoded(body):
    codec = Codec(dict)

    assert codec.decode(codec.encode(body)) == body


@given(st.binary())
def test_any_bytes_decode_or_raise_undecodable_error(payload):
    for kind in (dict, str, bytes, Order, Card, Mail, int, Any):
        try:
            Codec(kind).decode(payload)
        except UndecodableError as error:
            assert str(error).startswith("body is not ")


@pytest.mark.parametrize(
    ("kind", "body", "allowed"),
    [
        (Order, Line("a"), "Order"),
        (Mail, "a@example.com", "Mail"),
        (dict[str, int], [], "dict[str, int]"),
        (list[int], "12", "list[int]"),
        (int, True, "int"),
        (float, False, "float"),
        (str, b"a", "str"),
        (Card, {"number": 1}, "Card"),
    ],
    ids=str,
)
def test_body_of_another_type_is_refused_with_both_types(kind, body, allowed):
    with pytest.raises(BodyError) as caught:
        Codec(kind).encode(body)

    assert str(caught.value) == f"body must be {allowed}, not {type(body).__name__}"


def nested(depth):
    body = []
    for _ in range(depth):
        body = [body]
    return body


UNENCODABLE = {
    "object": (dict, {"a": object()}),
    "key": (dict, {object(): 1}),
    "surrogate": (str, "\udc80" + SECRET),
    "deep": (list, nested(100_000)),
    "nan": (float, math.nan),
    "inner infinity": (dict, {"a": [None, {"b": -math.inf}]}),
    "nan of a struct": (Point, Point(math.nan, 0)),
    "nan of a model": (Card, Card.model_construct(number=math.nan)),
}


@pytest.mark.parametrize("name", UNENCODABLE)
def test_body_that_json_cannot_hold_is_refused_without_its_value(name):
    kind, body = UNENCODABLE[name]
    with pytest.raises(BodyError) as caught:
        Codec(kind).encode(body)

    assert "cannot be encoded" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


UNDECODABLE = [
    (Order, b'{"id": "%s"}' % SECRET.encode(), "Order: Expected `int`, got `str` at `$.id`"),
    (Order, b'{"id": 1, "colour": "%s"}' % SECRET.encode(), "Order: ValidationError at `$.colour`"),
    (
        Order,
        b'{"id": 1, "lines": [{"sku": "x", "count": null}]}',
        "Order: Expected `int`, got `null` at `$.lines[0].count`",
    ),
    (Order, b'{"unknown": "%s"}' % SECRET.encode(), "Order: Object missing required field `id` at `$`"),
    (Order, SECRET.encode(), "Order: DecodeError at `$`"),
    (dict[str, int], b'{"%s": ""}' % SECRET.encode(), "dict[str, int]: Expected `int`, got `str` at `$[...]`"),
    (dict, b"\xff" + SECRET.encode(), "dict: DecodeError at `$`"),
    (list, b"[" * 100_000, "list: RecursionError at `$`"),
    (str, b"\xff" + SECRET.encode(), "str: UnicodeDecodeError at `$`"),
    (Picky, b'{"age": -5}', "Picky: LookupError at `$`"),
    (Card, b'{"number": "%s"}' % SECRET.encode(), "Card: int_parsing at `$.number`"),
    (Card, b'{"number": 1, "limits": {"%s": "x"}}' % SECRET.encode(), "Card: int_parsing at `$.limits[...]`"),
    (Card, SECRET.encode(), "Card: json_invalid at `$`"),
    (list[Card], b'[{"number": "%s"}]' % SECRET.encode(), "list[reliq"),
]


@pytest.mark.parametrize(("kind", "payload", "said"), UNDECODABLE, ids=[said for *_, said in UNDECODABLE])
def test_undecodable_body_is_reported_by_field_without_its_value(kind, payload, said):
    with pytest.raises(UndecodableError) as caught:
        Codec(kind).decode(payload)

    if "[reliq" not in said:
        assert str(caught.value).startswith(f"body is not {said}")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


class Bare:
    pass


def test_type_that_json_cannot_be_read_into_is_refused():
    for kind in (Bare, 5, "Order", {1: 2}, type):
        with pytest.raises(ConfigurationError, match="cannot be read from JSON.*use a dataclass"):
            Codec(kind)
