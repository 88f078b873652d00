"""The mutants still fit the source, and the model finds some of them at once. All: `python -m tests.mutants --long`."""

import re

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import HARNESS, KEYED, MODEL, ROOT, Mutant
from tests.mutants.trial import try_out

#: One for each kind of rule: time, receipts, places, account, order, expiry.
AT_ONCE = (
    "seconds clock",
    "ack without receipt",
    "claim leaves an id behind",
    "a lane's answer is forgotten",
    "acks are not counted where they happen",
    "deadlines rounded down",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_the_text_of_every_mutant_is_there_once(mutant):
    text = (ROOT / "reliq" / mutant.file).read_text()

    assert text.count(mutant.old) == 1
    assert mutant.by in (MODEL, KEYED, HARNESS) or (ROOT / mutant.by).exists()


def test_the_table_has_every_mutant_and_no_other():
    section = (ROOT / "tests" / "README.md").read_text("utf-8").partition("## Mutants")[2].partition("\n## ")[0]
    told = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)

    assert sorted(told[2:]) == sorted(one.name for one in MUTANTS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", AT_ONCE)
def test_the_model_finds_a_mutant_at_once(name):
    [mutant] = [one for one in MUTANTS if one.name == name]

    outcome = try_out(mutant, examples=mutant.examples)

    assert outcome.caught
    assert outcome.words.startswith("assert "), outcome.words


@pytest.mark.timeout(400)
def test_what_changes_nothing_is_not_caught():
    nothing = Mutant("nothing", "lua/ack.lua", "local done, bodies", "local done,  bodies")

    assert not try_out(nothing, examples=20).caught
