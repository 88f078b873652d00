"""Settings and options: the valid values of each check, and the invalid values with their errors."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given, strategies as st
from tenacity import wait_fixed, wait_random_exponential

from reliq.errors import ConfigurationError
from reliq.publish import unix_ms
from reliq.queue import listing, pause_by
from reliq.settings import Durability, HandlerSettings, QueueSettings, WorkerSettings, check_int, milliseconds, seconds

NOW = datetime.now(UTC)
TEN_YEARS = 3650 * 86_400

BAD_SECONDS = {
    "True": (True, "seconds or a timedelta, not True"),
    "nan": (math.nan, "seconds or a timedelta, not nan"),
    "text": ("5", "seconds or a timedelta, not a str"),
    "None": (None, "seconds or a timedelta, not a NoneType"),
    "Decimal": (Decimal(5), "seconds or a timedelta, not a Decimal"),
    "infinity": (math.inf, "0 to 315360000 seconds, not inf"),
    "negative": (-0.001, "0 to 315360000 seconds, not -0.001"),
    "over ten years": (TEN_YEARS + 1, "0 to 315360000 seconds, not 315360001"),
    "400 digits": (10**400, "0 to 315360000 seconds, not a number of more than 20 digits"),
    "5000 negative digits": (-(10**5000), "0 to 315360000 seconds, not a number of more than 20 digits"),
    "longest timedelta": (timedelta.max, "0 to 315360000 seconds, not "),
}
BAD_WHOLE = {
    "True as number": (True, "a whole number, not True"),
    "float": (1.0, "a whole number, not 1.0"),
    "text as number": ("1", "a whole number, not a str"),
    "None as number": (None, "a whole number, not a NoneType"),
    "below 0": (-1, "0 to 1000, not -1"),
    "too large": (1001, "0 to 1000, not 1001"),
    "5000 digits": (10**5000, "0 to 1000, not a number of more than 20 digits"),
}


@pytest.mark.parametrize("case", BAD_SECONDS | BAD_WHOLE)
def test_bad_duration_or_number_is_refused_with_its_name_and_value(case):
    value, said = (BAD_SECONDS | BAD_WHOLE)[case]

    with pytest.raises(ConfigurationError) as caught:
        seconds("delay", value) if case in BAD_SECONDS else check_int("delay", value, most=1000)

    assert str(caught.value).startswith(f"delay must be {said}")


@given(st.integers() | st.floats() | st.timedeltas() | st.text() | st.none() | st.booleans())
def test_any_duration_is_accepted_or_refused_by_name(value):
    try:
        assert 0 <= seconds("delay", value) <= TEN_YEARS
    except ConfigurationError as error:
        assert str(error).startswith("delay must be ")


BAD_TIMES = {
    "naive": (datetime(2026, 1, 1), "an aware datetime"),  # noqa: DTZ001  it is refused
    "number": (5, "an aware datetime"),
    "text": ("now", "an aware datetime"),
    "over ten years ahead": (NOW + timedelta(days=4000), "between 1970 and ten years from now"),
    "before 1970": (datetime(1900, 1, 1, tzinfo=UTC), "between 1970 and ten years from now"),
    "latest": (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "between 1970 and ten years from now"),
}


def test_bad_due_time_reason_and_cursor_are_refused():
    for value, said in BAD_TIMES.values():
        with pytest.raises(ConfigurationError, match=f"^at must (be|lie) {said}"):
            unix_ms(value)
    for reason in ("a\nb", "a" * 201, 5):
        with pytest.raises(ConfigurationError, match="^reason must be one line of at most 200 characters"):
            pause_by("me", reason)
    for after in ("x", "1-", None, 5):
        with pytest.raises(ConfigurationError, match="^after must be the `letter` of a dead letter"):
            listing(None, 1, after)


BOUNDS = {
    "QueueSettings.retries": (QueueSettings, "retries", 0, 1000),
    "QueueSettings.max_body": (QueueSettings, "max_body", 1, 16 * 1_048_576),
    "QueueSettings.dead_letter_limit": (QueueSettings, "dead_letter_limit", 0, 10_000_000),
    "QueueSettings.keep_completed": (QueueSettings, "keep_completed", 0, 100_000),
    "QueueSettings.ttl": (QueueSettings, "ttl", 0.001, TEN_YEARS),
    "QueueSettings.dedup": (QueueSettings, "dedup", 0, TEN_YEARS),
    "QueueSettings.dead_letter_ttl": (QueueSettings, "dead_letter_ttl", 1, TEN_YEARS),
    "Durability.timeout": (Durability, "timeout", 0.001, 60),
    "HandlerSettings.lease": (HandlerSettings, "lease", 0.05, 86_400),
    "HandlerSettings.timeout": (HandlerSettings, "timeout", 0.001, TEN_YEARS),
    "HandlerSettings.concurrency": (HandlerSettings, "concurrency", 1, 10_000),
    "HandlerSettings.weight": (HandlerSettings, "weight", 1, 1000),
    "HandlerSettings.batch": (HandlerSettings, "batch", 1, 500),
    "WorkerSettings.concurrency": (WorkerSettings, "concurrency", 1, 10_000),
    "WorkerSettings.max_jobs": (WorkerSettings, "max_jobs", 1, 10**9),
    "WorkerSettings.grace": (WorkerSettings, "grace", 0, TEN_YEARS),
}


@pytest.mark.parametrize("setting", BOUNDS)
def test_setting_accepts_its_bounds_and_refuses_values_beyond(setting):
    kind, name, least, most = BOUNDS[setting]

    for allowed in (least, most):
        assert getattr(kind(**{name: allowed}), name) == allowed
    for beyond in (least - 0.0009 if isinstance(least, float) else least - 1, most + 1):
        with pytest.raises(ConfigurationError, match=rf"^{name} must be .*to "):
            kind(**{name: beyond})


def test_settings_accept_none_numbers_timedeltas_single_classes_and_any_backoff():
    assert HandlerSettings(timeout=None, concurrency=None).timeout is None
    assert WorkerSettings(max_jobs=None).max_jobs is None
    assert {QueueSettings(ttl=ttl).ttl for ttl in (timedelta(hours=2), 7200, 7200.0)} == {7200.0}
    assert HandlerSettings(retry_on=OSError).retry_on == (OSError,)
    for backoff in (wait_fixed(5), wait_random_exponential(), wait_fixed(1) + wait_fixed(2)):
        assert HandlerSettings(backoff=backoff).backoff is backoff


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("backoff", 5, "backoff must be one of tenacity's wait strategies"),
        ("on_decode_error", "drop", "on_decode_error must be 'retry' or 'reject', not 'drop'"),
        ("retry_on", (5,), "retry_on must be an exception class or a tuple of exception classes"),
        ("reject_on", (KeyboardInterrupt,), "reject_on must be an exception class or a tuple of exception classes"),
    ],
    ids=["backoff", "undecodable", "number", "BaseException"],
)
def test_bad_setting_of_a_handler_is_refused_by_name(name, value, said):
    with pytest.raises(ConfigurationError, match=said):
        HandlerSettings(**{name: value})


@pytest.mark.parametrize("kind", [QueueSettings, HandlerSettings, WorkerSettings])
def test_settings_are_frozen_and_passed_by_name(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, 1)
    with pytest.raises(TypeError):
        kind(1)


@given(st.floats(0, 10**8))
def test_milliseconds_are_rounded_up(value):
    # The next float after 1e8 is 1.5e-8 away.
    assert value - 1e-7 <= milliseconds(value) / 1000 < value + 0.001001
