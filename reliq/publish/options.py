"""The options of a message, checked before anything is sent."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args

from reliq.errors import ConfigurationError
from reliq.message import PRIORITY_LINES, Duration, Priority
from reliq.settings import LONGEST_SECONDS, check_is_one_of, milliseconds, seconds, whole
from reliq.wireformat import NUMBER_LIMIT, check_key

if TYPE_CHECKING:
    from reliq.outgoing import Outgoing


def line_of(outgoing: Outgoing[Any]) -> str:
    """
    Return where a message waits when it is due: its key, what stands for its priority, or empty text.

    Raises:
        ConfigurationError: the key or the priority is not allowed, or both are given.
    """
    if outgoing.key is None and outgoing.priority == "normal":
        return ""
    check_is_one_of("priority", outgoing.priority, get_args(Priority))
    if outgoing.key is None:
        return PRIORITY_LINES[outgoing.priority]
    if outgoing.priority != "normal":
        raise ConfigurationError(
            f"give key or priority, not both: the messages of key {outgoing.key!r:.40} take turns with those of other "
            "keys; give the key more turns with Queue(key_weights={…})"
        )
    return check_key(outgoing.key)


def check_bare(outgoing: Outgoing[Any]) -> None:
    """Raise ConfigurationError for what a queue of the Go original has no place for."""
    given = {
        "headers": outgoing.headers,
        "incarnation": outgoing.incarnation is not None,
        "key": outgoing.key is not None,
        "priority": outgoing.priority != "normal",
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigurationError(f"{name} cannot be sent on a queue in the hdt3213 layout: its bodies are bare")


def incarnation(outgoing: Outgoing[Any]) -> int | None:
    """Return what the message says beside its chosen id; raise ConfigurationError for what is no such number."""
    if outgoing.incarnation is None:
        return None
    if outgoing.id is None:
        raise ConfigurationError("incarnation needs an id chosen by you: publish(..., id='order-7', incarnation=1)")
    return whole("incarnation", outgoing.incarnation, most=NUMBER_LIMIT - 1)


def when(delay: Duration, at: datetime | None) -> tuple[int | None, int]:
    """Return unix ms, or None, and a delay in ms; raise ConfigurationError when either is not allowed, or both given."""
    delay_ms = milliseconds(seconds("delay", delay))
    if at is not None and delay_ms:
        raise ConfigurationError("give delay or at, not both")
    return None if at is None else unix_ms(at), delay_ms


def unix_ms(at: datetime) -> int:
    """Return an aware datetime in unix ms; raise ConfigurationError for a naive or far one."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ConfigurationError("at must be an aware datetime, such as datetime.now(UTC) + timedelta(hours=1)")
    unix = at.timestamp()
    now = datetime.now(at.tzinfo).timestamp()
    if unix < 0 or unix - now > LONGEST_SECONDS:
        raise ConfigurationError(f"at must lie between 1970 and ten years from now, not {at.isoformat()}")
    return milliseconds(unix)
