"""A body comes back as it was sent, or its publish is refused with the field and the reason, never with the value."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

import pydantic
import pytest
from pydantic.alias_generators import to_camel

from reliq.codec.codec import Codec
from reliq.errors import BodyError, UndecodableError

SECRET = "hunter2-s3cret"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
T = TypeVar("T")


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


class Mail(TypedDict):
    to: str
    size: int


COMES_BACK = [
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


@pytest.mark.parametrize(("kind", "body"), COMES_BACK, ids=lambda one: str(one)[:40])
def test_body_of_a_users_class_is_decoded_as_it_was_encoded(kind, body):
    codec = Codec(kind)

    back = codec.decode(codec.encode(body))

    assert back == body
    assert type(back) is type(body)


def test_aliases_are_the_names_in_json_and_untyped_fields_are_plain_json():
    assert Codec(Signup).encode(Signup(user_name="ann")) == b'{"userName":"ann","referredBy":null}'
    assert Codec(Parcel).decode(b'{"to": {"street": "x"}, "signup": {"userName": "ann"}}').signup.user_name == "ann"
    parcel = Parcel(Address("here"), notes={"at": NOW, "in": (1, 2), 5: {1}}, stops=["a"])
    for body in (parcel, Owner(more={"at": NOW, "in": (1, 2), "pet": Cat()})):
        assert isinstance(Codec(type(body)).decode(Codec(type(body)).encode(body)), type(body))


Scalar = type("int64", (), {"__module__": "numpy"})  # numpy itself is no dependency of the tests

REFUSED = [
    (TwoAliases, TwoAliases(**{"in": 5}), "a worker could not read it: missing at `$.in`"),
    (Login, Login(user="ann", token=SECRET), "a secret is written as asterisks (give the field a field_serializer"),
    (Cached, Cached(number=1, memo=SECRET), "a str that is left out (exclude), or is read as another value"),
    (Upload, Upload(name="a", data=b"\xff"), "bytes that are no UTF-8 (pydantic: ConfigDict(ser_json_bytes='base64'"),
    (Cat, Kitten(), "a Kitten would be read as Cat, without what is its own, at `$`"),
    (Parcel, Parcel(Home("here")), "a Home would be read as Address, without what is its own, at `$.to`"),
    (Cat, Cat.model_construct(lives="many"), "a worker could not read it: int_parsing at `$.lives`"),
    (Cat, Cat.model_construct(lives="4"), "a str that is left out (exclude), or is read as another value or type, at"),
    (Address, Address(street=5), "a worker could not read it: Expected `str`, got `int` at `$.street`"),
    (Mail, {"to": "ann", "size": SECRET}, "a worker could not read it: Expected `int`, got `str` at `$.size`"),
    (list[Address], [Address("x"), Address(None)], "got `null` at `$[1].street`"),
    (Cat | Dog, SECRET, "body must be"),
    (Address, Address(Path(SECRET)), "cannot be encoded: JSON cannot hold a"),
    (dict, {"a": {SECRET: [1, object()]}}, "JSON cannot hold a object (TypeError) at `$[...][...][1]`"),
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
def test_body_that_would_be_decoded_otherwise_is_refused_with_field(kind, body, said):
    with pytest.raises(BodyError) as caught:
        Codec(kind).encode(body)

    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_body_of_a_redefined_class_is_refused_with_advice():
    again = dataclass(type("Address", (), {"__annotations__": {"street": str}}))

    with pytest.raises(
        BodyError, match="^body must be Address, not a Address of another definition .*its queue made again"
    ):
        Codec(Address).encode(again("here"))
    with pytest.raises(BodyError, match="^body must be Address, not str$"):
        Codec(Address).encode(SECRET)


def test_body_without_validation_is_only_encoded():
    codec = Codec(Address, validate=False)

    payload = codec.encode(Address(street=5))

    with pytest.raises(UndecodableError, match="Expected `str`, got `int`"):
        codec.decode(payload)
