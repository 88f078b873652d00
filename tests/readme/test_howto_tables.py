"""The tables of docs/howto/: each row, of a type or of a change of a body, is as the page says."""

import re
import sys
from dataclasses import dataclass

import pydantic
import pytest
from pages import ROOT
from written import attribute

from reliq import BodyError, ConfigurationError, Consumer, Queue
from reliq.codec.codec import Codec
from reliq.testing import isolated

TYPES, DEPLOYS = (ROOT / "docs" / "howto" / name for name in ("types.md", "deploys.md"))


def rows(page, heading):
    """Return the cells of each table whose first columns are those of `heading`, without the marks of code."""
    found, is_in = [], False
    for line in page.read_text("utf-8").splitlines():
        is_in = line.startswith("|") and (is_in or line.startswith(heading))
        if is_in and not line.startswith((heading, "| ---")):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found.append([cell.strip().strip("`").strip().replace("\\|", "|") for cell in cells])
    return found


ARRIVES, REFUSED = rows(TYPES, "| type | published | JSON |"), rows(TYPES, "| type | published | refused")
CHANGES = rows(DEPLOYS, "| change | before | after |")


@pytest.fixture
def names(written):
    """The names of the page's own types."""
    written("howto/types.md")
    return vars(attribute("shop.bodies:pydantic") and sys.modules["shop.bodies"]).copy()


def test_each_type_arrives_as_the_page_says(names):
    assert len(ARRIVES) == 32
    for kind, sent, text, arrived in ARRIVES:
        codec = Codec(eval(kind, names))
        payload = codec.encode(eval(sent, names))
        back, wanted = codec.decode(payload), eval(arrived, names)
        assert (payload.decode(), back, type(back)) == (text, wanted, type(wanted)), (kind, sent)


def test_each_type_is_refused_as_the_page_says(names):
    assert len(REFUSED) == 11
    for kind, sent, why in REFUSED:
        with pytest.raises((BodyError, ConfigurationError), match=re.escape(why)):
            Codec(eval(kind, names)).encode(eval(sent, names))


def defined(kind, fields):
    """Return the class `Order` with the fields of a cell of the page, as a dataclass or a pydantic model."""
    head = {"dataclass": "@dataclass\nclass Order:", "model": "class Order(pydantic.BaseModel):"}[kind]
    names = {"dataclass": dataclass, "pydantic": pydantic}
    exec(head + "".join(f"\n    {field}" for field in fields.split("; ")), names)
    return names["Order"]


def message(kind):
    """Return a body of a class: whatever its fields are, they have a number or a text."""
    return kind(
        **{name: "text" if getattr(one, "__name__", one) == "str" else 1 for name, one in kind.__annotations__.items()}
    )


def noting(seen):
    """Return a handler that notes bodies."""

    def note(body):
        seen.append(body)

    return note


@pytest.mark.parametrize("kind", ["dataclass", "model"])
@pytest.mark.parametrize("change", CHANGES, ids=[row[0] for row in CHANGES])
def test_old_and_new_workers_read_messages_of_each_other_as_the_page_says(change, kind, kit_url):
    _, before, after, old_worker, new_worker = change
    old, new = defined(kind, before), defined(kind, after)

    for writer, reader, told in ((new, old, old_worker), (old, new, new_worker)):
        with isolated(kit_url) as reliq:
            Queue("orders", writer).publish(message(writer), id="one")
            right, wrong, seen = Consumer(), Consumer(), []
            wrong.handler(Queue("orders", reader))(noting(seen))
            done = reliq.drain(wrong, fail_fast=False)
            assert (done.acked, done.nacked) == ((["one"], []) if told.startswith("reads it") else ([], ["one"]))
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
