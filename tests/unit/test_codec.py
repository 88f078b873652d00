"""A body is decoded as it was published; an error about a body contains the field but never the value."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given, strategies as st
from pydantic.alias_generators import to_camel

from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError, UndecodableError

SECRET = "hunter2-s3cret"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
T = TypeVar("T")


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


class Signup(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")
    user_name: str
    referred_by: str | None = None

    @pydantic.computed_field
    @property
    def greeting(self) -> str:
        return f"Hello {self.user_name}"


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="no")


class TwoAliases(pydantic.BaseModel):
    number: int = pydantic.Field(validation_alias="in", serialization_alias="out")


class Login(pydantic.BaseModel):
    user: str
    token: pydantic.SecretStr


class OpenLogin(Login):
    @pydantic.field_serializer("token", when_used="json")
    def _shown(self, token):
        return token.get_secret_value()


class Cached(pydantic.BaseModel):
    number: int
    memo: str = pydantic.Field(default="", exclude=True)
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)


class Upload(pydantic.BaseModel):
    name: str
    data: bytes


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Kitten(Cat):
    weeks: int = 1


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Owner(pydantic.BaseModel):
    pets: list[Pet] = []
    born: timedelta = timedelta(days=1, microseconds=3)
    money: Decimal = Decimal("1.10")
    more: dict[str, Any] = {}


class Box(pydantic.BaseModel, Generic[T]):
    inside: T


@dataclass
class Address:
    street: str
    since: datetime | None = None


@dataclass
class Home(Address):
    garden: bool = True


@dataclass
class Parcel:
    to: Address
    signup: Signup | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()


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
    (Signup, Signup(user_name="ann", referred_by=None)),
    (Aliased, Aliased(no=5)),
    (OpenLogin, OpenLogin(user="ann", token="x")),
    (Cached, Cached(number=1)),
    (Upload, Upload(name="a", data=b"text")),
    (Cat | Dog, Dog(tricks=["sit"])),
    (list[Pet], [Cat(), Dog()]),
    (dict[str, Cat | None], {"a": None, "b": Cat()}),
    (Owner, Owner(pets=[Dog(), Cat()])),
    (Box[Pet], Box[Pet](inside=Dog())),
    (Address | None, Address("here", NOW)),
    (Parcel, Parcel(Address("here"), Signup(user_name="ann"))),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=lambda one: str(one)[:40])
def test_body_is_decoded_as_it_was_encoded(kind, body):
    codec = Codec(kind)
    back = codec.decode(codec.encode(body))

    assert back == body
    assert type(back) is (float if kind is float else type(body))


def test_aliases_are_the_names_in_json_and_untyped_fields_are_plain_json():
    assert Codec(Signup).encode(Signup(user_name="ann")) == b'{"userName":"ann","referredBy":null}'
    assert Codec(Parcel).decode(b'{"to": {"street": "x"}, "signup": {"userName": "ann"}}').signup.user_name == "ann"
    parcel = Parcel(Address("here"), notes={"at": NOW, "in": (1, 2), 5: {1}}, stops=["a"])
    for body in (parcel, Owner(more={"at": NOW, "in": (1, 2), "pet": Cat()})):
        assert isinstance(Codec(type(body)).decode(Codec(type(body)).encode(body)), type(body))


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


def nested(depth):
    body = []
    for _ in range(depth):
        body = [body]
    return body


Scalar = type("int64", (), {"__module__": "numpy"})  # the tests do not depend on numpy

REFUSED = [
    (Order, Line("a"), "body must be Order, not Line"),
    (Mail, "a@example.com", "body must be Mail, not str"),
    (dict[str, int], [], "body must be dict[str, int], not list"),
    (list[int], SECRET, "body must be list[int], not str"),
    (int, True, "body must be int, not bool"),
    (float, False, "body must be float, not bool"),
    (str, b"a", "body must be str, not bytes"),
    (Card, {"number": 1}, "body must be Card, not dict"),
    (dict, {object(): 1}, "cannot be encoded"),
    (str, "\udc80" + SECRET, "cannot be encoded"),
    (list, nested(100_000), "cannot be encoded"),
    (float, math.nan, "cannot be encoded"),
    (dict, {"a": [None, {"b": -math.inf}]}, "cannot be encoded"),
    (Point, Point(math.nan, 0), "cannot be encoded"),
    (Card, Card.model_construct(number=math.nan), "cannot be encoded"),
    (TwoAliases, TwoAliases(**{"in": 5}), "a worker could not decode it: missing at `$.in`"),
    (Login, Login(user="ann", token=SECRET), "a secret is written as asterisks (give the field a field_serializer"),
    (Cached, Cached(number=1, memo=SECRET), "a str that is left out (exclude), or is read as another value"),
    (Upload, Upload(name="a", data=b"\xff"), "bytes that are no UTF-8 (pydantic: ConfigDict(ser_json_bytes='base64'"),
    (Cat, Kitten(), "a Kitten would be read as Cat, without its own fields, at `$`"),
    (Parcel, Parcel(Home("here")), "a Home would be read as Address, without its own fields, at `$.to`"),
    (Cat, Cat.model_construct(lives="many"), "a worker could not decode it: int_parsing at `$.lives`"),
    (Cat, Cat.model_construct(lives="4"), "a str that is left out (exclude), or is read as another value or type, at"),
    (Address, Address(street=5), "a worker could not decode it: Expected `str`, got `int` at `$.street`"),
    (Mail, {"to": "ann", "cc": SECRET}, "a worker could not decode it: Expected `array`, got `str` at `$.cc`"),
    (list[Address], [Address("x"), Address(None)], "got `null` at `$[1].street`"),
    (Cat | Dog, SECRET, "body must be"),
    (Address, Address(Path(SECRET)), "cannot be encoded: JSON cannot hold a"),
    (dict, {"a": {SECRET: [1, object()]}}, "JSON cannot hold an object (TypeError) at `$[...][...][1]`"),
    (dict, {"a": {(1, 2): SECRET}}, "JSON cannot hold a key of this dict (TypeError) at `$[...]`"),
    (
        dict,
        {"a": Scalar()},
        "JSON cannot hold a numpy.int64 (TypeError); `tolist()` makes it Python's own, at `$[...]`",
    ),
    (dict, {"a": ["\udc80" + SECRET]}, "text with half of a surrogate pair at `$[...][0]`"),
]


@pytest.mark.parametrize(
    ("kind", "body", "said"), REFUSED, ids=[f"{type(body).__name__}: {said}" for _, body, said in REFUSED]
)
def test_body_that_would_not_come_back_is_refused_without_its_value(kind, body, said):
    with pytest.raises(BodyError) as caught:
        Codec(kind).encode(body)

    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_body_of_a_redefined_class_is_refused_with_advice():
    again = dataclass(type("Address", (), {"__annotations__": {"street": str}}))

    with pytest.raises(
        BodyError, match="^body must be Address, not a Address of another definition .*create its queue again"
    ):
        Codec(Address).encode(again("here"))
    with pytest.raises(BodyError, match="^body must be Address, not str$"):
        Codec(Address).encode(SECRET)


def test_body_without_validation_is_only_encoded():
    codec = Codec(Address, validate=False)

    payload = codec.encode(Address(street=5))

    with pytest.raises(UndecodableError, match="Expected `str`, got `int`"):
        codec.decode(payload)


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
