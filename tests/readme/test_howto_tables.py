"""The tables of payload types and of schema changes: each row is as the page says."""

import re
import sys
from dataclasses import dataclass

import pydantic
import pytest
from pages import ROOT, rows
from written import attribute

from reliq import BodyError, ConfigurationError, Consumer, Queue
from reliq.codec import Codec
from reliq.testing import isolated

DEPLOYS = ROOT / "docs" / "production" / "schema-changes.md"


def unquoted(page, first):
    """Return the rows of tables without code marks and the words before them."""
    return [[re.sub("^[A-Za-z ]*(?=`)", "", cell).strip("`").strip() for cell in row] for row in rows(page, first)]


ARRIVES, REFUSED = (
    unquoted("reference/types.md", f"type | published | {third}") for third in ("JSON", "refused, because")
)
CHANGES = unquoted("production/schema-changes.md", "change | example")


@pytest.fixture
def names(written):
    """The names of the page's own types."""
    written("reference/types.md")
    return vars(attribute("shop.bodies:pydantic") and sys.modules["shop.bodies"]).copy()


def test_each_type_arrives_as_the_page_says(names):
    assert len(ARRIVES) == 20
    for kind, sent, text, *changed in ARRIVES:
        codec = Codec(eval(kind, names))
        payload = codec.encode(eval(sent, names))
        back, wanted = codec.decode(payload), eval(changed[0] if changed else sent, names)
        assert (payload.decode(), back, type(back)) == (text, wanted, type(wanted)), (kind, sent)


def test_each_type_is_refused_as_the_page_says(names):
    assert len(REFUSED) == 8
    for kind, sent, why in REFUSED:
        with pytest.raises((BodyError, ConfigurationError), match=re.escape(why)):
            Codec(eval(kind, names)).encode(eval(sent, names))


def defined(kind, fields):
    """Return the class `Order` with the fields in a cell of the page, as a dataclass or a pydantic model."""
    head = {"dataclass": "@dataclass\nclass Order:", "model": "class Order(pydantic.BaseModel):"}[kind]
    names = {"dataclass": dataclass, "pydantic": pydantic}
    exec(head + "".join(f"\n    {field}" for field in fields.split("; ")), names)
    return names["Order"]


def message(kind):
    """Return an instance of a class; its fields are numbers or texts."""
    return kind(
        **{name: "text" if getattr(one, "__name__", one) == "str" else 1 for name, one in kind.__annotations__.items()}
    )


def noting(seen):
    """Return a handler that records bodies."""

    def note(body):
        seen.append(body)

    return note


@pytest.mark.parametrize("kind", ["dataclass", "model"])
@pytest.mark.parametrize("change", CHANGES, ids=[row[0] for row in CHANGES])
def test_old_and_new_workers_read_messages_of_each_other_as_the_page_says(change, kind, kit_url):
    _, example, result = change
    old, new = (defined(kind, fields) for fields in example.split("` → `"))

    for writer, reader, failure in ((new, old, "old workers cannot"), (old, new, "new workers cannot")):
        with isolated(kit_url) as reliq:
            Queue("orders", writer).publish(message(writer), id="one")
            right, wrong, seen = Consumer(), Consumer(), []
            wrong.handler(Queue("orders", reader))(noting(seen))
            done = reliq.drain(wrong, fail_fast=False)
            is_read = failure not in result and "only" not in result
            assert (done.acked, done.nacked) == ((["one"], []) if is_read else ([], ["one"]))
            right.handler(Queue("orders", writer))(noting(seen))
            reliq.drain(right, scheduled=True)
            assert (len(seen), Queue("orders").counts().alive) == (1, 0)


def test_pydantic_alias_reads_both_names_and_writes_the_new_one():
    [field] = re.findall(r"^`no: (int = Field\(.*\))`", DEPLOYS.read_text("utf-8"), re.MULTILINE)
    names = {"Field": pydantic.Field, "AliasChoices": pydantic.AliasChoices}
    exec(f"alias: {field}", names)
    codec = Codec(pydantic.create_model("Order", no=(int, names["alias"])))

    assert [codec.decode(text).no for text in (b'{"no": 42}', b'{"number": 42}')] == [42, 42]
    assert codec.encode(codec.decode(b'{"no": 42}')) == b'{"number":42}'


def test_renamed_field_is_read_by_both_names(written):
    written("production/schema-changes.md")
    codec = Codec(attribute("shop.queues:Order"))

    assert [codec.decode(text).order_no for text in (b'{"no": 42}', b'{"number": 42}')] == [42, 42]
