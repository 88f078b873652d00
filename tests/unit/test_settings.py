"""Every setting says what it takes."""

import dataclasses
import math
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given, strategies as st
from tenacity import wait_fixed, wait_random_exponential

from reliq.errors import ConfigurationError
from reliq.settings import HandlerSettings, QueueSettings, WorkerSettings, milliseconds, seconds, whole

NO_SECONDS = [
    True,
    False,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.001,
    "5",
    None,
    b"5",
    Decimal(5),
    1j,
    10**400,
    -(10**5000),
]
NO_SECONDS += [timedelta(days=-1), timedelta.max]
NO_WHOLE = [True, 1.0, "1", None, -1, 10**5000, -(10**5000), math.nan]

DURATIONS = [
    (QueueSettings, "ttl"),
    (QueueSettings, "dedup"),
    (QueueSettings, "letters_ttl"),
    (HandlerSettings, "lease"),
    (HandlerSettings, "timeout"),
    (WorkerSettings, "grace"),
]
NUMBERS = [
    (QueueSettings, "retries"),
    (QueueSettings, "max_body"),
    (QueueSettings, "letters_max"),
    (HandlerSettings, "concurrency"),
    (HandlerSettings, "weight"),
    (WorkerSettings, "concurrency"),
    (WorkerSettings, "max_jobs"),
]
UNLIMITED = [(HandlerSettings, "timeout"), (HandlerSettings, "concurrency"), (WorkerSettings, "max_jobs")]


def refused(settings, values):
    """Every setting with every value, None left out where it says that there is no limit."""
    return [
        pytest.param(kind, name, value, id=f"{kind.__name__}.{name}-{number}")
        for kind, name in settings
        for number, value in enumerate(values)
        if value is not None or (kind, name) not in UNLIMITED
    ]


@pytest.mark.parametrize(("kind", "name", "value"), refused(DURATIONS, NO_SECONDS) + refused(NUMBERS, NO_WHOLE))
def test_what_is_no_duration_or_number_is_refused_by_name(kind, name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} must be "):
        kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), UNLIMITED)
def test_none_says_that_there_is_no_limit(kind, name):
    assert getattr(kind(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("kind", "name", "least", "most"),
    [
        (QueueSettings, "retries", 0, 1000),
        (QueueSettings, "max_body", 1, 16 * 1_048_576),
        (QueueSettings, "letters_max", 0, 10_000_000),
        (QueueSettings, "ttl", 0.001, 3650 * 86_400),
        (QueueSettings, "dedup", 0, 3650 * 86_400),
        (HandlerSettings, "lease", 0.05, 86_400),
        (HandlerSettings, "timeout", 0.001, 3650 * 86_400),
        (HandlerSettings, "concurrency", 1, 10_000),
        (HandlerSettings, "weight", 1, 1000),
        (WorkerSettings, "concurrency", 1, 10_000),
        (WorkerSettings, "max_jobs", 1, 10**9),
        (WorkerSettings, "grace", 0, 3650 * 86_400),
    ],
    ids=str,
)
def test_the_bounds_are_allowed_and_what_lies_beyond_is_refused_with_them(kind, name, least, most):
    for allowed in (least, most):
        assert getattr(kind(**{name: allowed}), name) == allowed
    for beyond in (least - 0.0009 if isinstance(least, float) else least - 1, most + 1):
        with pytest.raises(ConfigurationError, match=rf"^{name} must be .*to "):
            kind(**{name: beyond})


@pytest.mark.parametrize("duration", [timedelta(hours=2), 7200, 7200.0])
def test_a_duration_may_be_a_number_or_a_timedelta(duration):
    assert QueueSettings(ttl=duration).ttl == 7200.0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("backoff", 5, "backoff must be one of tenacity's wait strategies"),
        ("undecodable", "drop", "undecodable must be 'retry' or 'reject', not 'drop'"),
        ("retry_on", (5,), "retry_on must be exception classes"),
        ("reject_on", (KeyboardInterrupt,), "reject_on must be exception classes"),
        ("reject_on", "ValueError", "reject_on must be exception classes"),
    ],
)
def test_a_handlers_other_settings_are_refused_by_name(name, value, said):
    with pytest.raises(ConfigurationError, match=said):
        HandlerSettings(**{name: value})


def test_one_exception_class_stands_for_a_tuple():
    assert HandlerSettings(retry_on=OSError).retry_on == (OSError,)


@pytest.mark.parametrize("backoff", [wait_fixed(5), wait_random_exponential(), wait_fixed(1) + wait_fixed(2)])
def test_any_wait_strategy_is_a_backoff(backoff):
    assert HandlerSettings(backoff=backoff).backoff is backoff


@pytest.mark.parametrize(
    ("kind", "name"), [(QueueSettings, "ttl"), (HandlerSettings, "lease"), (WorkerSettings, "grace")]
)
def test_settings_are_frozen_and_given_by_name(kind, name):
    settings = kind()

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, name, 1)
    with pytest.raises(TypeError):
        kind(1)


@given(st.floats(0, 10**8))
def test_milliseconds_never_cut_a_wait_short(value):
    # Beside 1e8 the next float is 1.5e-8 away.
    assert value - 1e-7 <= milliseconds(value) / 1000 < value + 0.001001


@given(st.integers() | st.floats() | st.timedeltas() | st.text() | st.none() | st.booleans())
def test_a_duration_is_taken_or_refused_and_nothing_else(value):
    try:
        assert 0 <= seconds("delay", value) <= 3650 * 86_400
    except ConfigurationError as error:
        assert str(error).startswith("delay must be ")


@given(st.integers() | st.floats() | st.text() | st.none() | st.booleans())
def test_a_whole_number_is_taken_or_refused_and_nothing_else(value):
    try:
        assert 0 <= whole("retries", value, most=1000) <= 1000
    except ConfigurationError as error:
        assert str(error).startswith("retries must be ")
