"""`.ci/do mutants` takes minutes; this test only checks that each mutant still fits the code."""

from tests.harness.mutants.catalogue import MUTANTS
from tests.harness.mutants.mutant import ROOT


def test_text_of_each_mutant_occurs_once_in_its_file():
    found = {one.name: (ROOT / "reliq" / one.file).read_text().count(one.old) for one in MUTANTS}

    assert {name: times for name, times in found.items() if times != 1} == {}
