"""The limits that a queue may declare, and their form in Redis."""

import pytest
from hypothesis import given, strategies as st

from reliq.admin.keys import limits_of
from reliq.errors import ConfigurationError
from reliq.settings import Limits

RATES = st.builds(lambda number, unit: f"{number}/{unit}", st.integers(1, 10_000), st.sampled_from(["s", "m", "h"]))
LIMITS = st.one_of(
    st.builds(Limits, ordered=st.just(True), concurrency=st.none() | st.integers(1, 10**6)),
    st.builds(
        Limits,
        per_key=st.none() | st.integers(1, 10**6),
        rate=RATES,
        burst=st.none() | st.integers(1, 10**6),
        key_rate=st.none() | RATES,
        key_weights=st.dictionaries(st.sampled_from(["vip", "a b", "é"]), st.integers(1, 1000)),
    ),
)


def test_rate_is_microseconds_between_starts_rounded_up():
    rates = {"100/s": 10_000, "5/m": 12_000_000, "1000/h": 3_600_000, "3/s": 333_334}

    assert {text: Limits.parse_rate(text) for text in rates} == rates


def test_bad_rate_is_refused_with_what_is_allowed():
    for rate, wanted in {
        100: r"rate must be .* such as '100/s', '5/m' or '1000/h', not 100",
        "100": "not '100'",
        "0/s": "not '0/s'",
        "0.5/s": "not '0.5/s'",
        "5/d": "not '5/d'",
        "10001/s": "at most 10000/s, not '10001/s'",
        "99999999/h": "at most 10000/s",
    }.items():
        with pytest.raises(ConfigurationError, match=wanted):
            Limits(rate=rate)


BAD = {
    "ordered must be True or False, not 'yes'": {"ordered": "yes"},
    "leave out per_key, which is 2": {"ordered": True, "per_key": 2},
    "per_key must be 1 to 1000000, not 0": {"per_key": 0},
    "concurrency must be a whole number, not 1.5": {"concurrency": 1.5},
    "burst is for a rate: give rate too": {"burst": 5},
    "key_burst is for a rate: give key_rate too": {"key_burst": 5, "rate": "1/s"},
    "burst must be 1 to 1000000, not 0": {"rate": "1/s", "burst": 0},
    "key_rate must be": {"key_rate": "x"},
    "key_weights must be a mapping such as .* not a list": {"key_weights": [("vip", 4)]},
    "weight of 'vip' must be 1 to 1000, not 0": {"key_weights": {"vip": 0}},
    "key must be 1 to 128 bytes": {"key_weights": {"": 2}},
    "number of key_weights must be 0 to 1000, not 1001": {"key_weights": dict.fromkeys(map(str, range(1001)), 1)},
}


@pytest.mark.parametrize("wanted", BAD)
def test_bad_limit_is_refused_by_name(wanted):
    with pytest.raises(ConfigurationError, match=wanted):
        Limits(**BAD[wanted])


def test_burst_is_a_tenth_of_a_second_and_at_least_1_by_default():
    bursts = {"100/s": "10", "5/m": "1", "25/s": "2", "10000/s": "1000"}

    assert {rate: Limits(rate=rate).fields()["burst"] for rate in bursts} == bursts


def test_fields_in_redis_are_those_that_scripts_read():
    limits = Limits(
        per_key=2, rate="100/s", burst=20, key_rate="5/s", key_burst=1, concurrency=50, key_weights={"vip": 4}
    )

    assert limits.fields() == {
        "per_key": "2",
        "rate_us": "10000",
        "burst": "20",
        "key_rate_us": "200000",
        "key_burst": "1",
        "concurrency": "50",
        "weighted": "1",
        "weight:vip": "4",
    }
    assert Limits(ordered=True).fields() == {"ordered": "1", "per_key": "1"}
    assert Limits().fields() == {}


@given(LIMITS)
def test_limits_are_read_back_as_written(limits):
    found = limits_of({**limits.fields(), "on": "1", "declared": limits.declaration, "foreign": "x"})

    assert found.fields() == limits.fields()
    assert found.declaration == limits.declaration


def test_rate_is_read_back_in_the_unit_a_person_would_write():
    rates = {"100/s": "100/s", "7/s": "7/s", "5/m": "5/m", "1000/h": "1000/h", "60/h": "1/m"}

    assert {rate: limits_of(Limits(rate=rate).fields()).rate for rate in rates} == rates
    with pytest.raises(ConfigurationError, match="have 'many' as per_key, which must be a whole number"):
        limits_of({"per_key": "many"})


def test_declaration_changes_with_its_values_only():
    one, other = (Limits(per_key=2, key_weights=weights) for weights in ({"a": 2, "b": 3}, {"b": 3, "a": 2}))

    assert one.declaration == other.declaration != Limits(per_key=3, key_weights={"a": 2, "b": 3}).declaration
