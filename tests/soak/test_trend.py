"""What grew is found; what only filled at the start, or moves about, is not."""

from dataclasses import replace

import pytest

from tests.soak.gauges import Sample
from tests.soak.trend import ALLOWED, faults, growth, per_hour

STEADY = [
    Sample(5.0 * n, 80.0 + n % 2, 50.0, 53, 28, 1.2 + n % 3 / 10, 7, 60, 40 + n % 7, 1000 * n) for n in range(100)
]


def test_a_steady_run_has_nothing_that_grew():
    assert faults(STEADY) == []
    assert growth(STEADY, "threads") == per_hour(STEADY, "threads") == 0


def test_what_fills_at_the_start_has_not_grown():
    assert faults([replace(one, worker_mib=min(one.worker_mib, 40.0 + one.at)) for one in STEADY]) == []


@pytest.mark.parametrize("name", ALLOWED)
def test_what_grows_all_the_time_is_found(name):
    grown = [replace(one, **{name: getattr(one, name) + one.at / 10}) for one in STEADY]

    assert [words.split()[0] for words in faults(grown)] == [name]
    assert per_hour(grown, name) == pytest.approx(360, rel=0.1)
