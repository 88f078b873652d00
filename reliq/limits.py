"""
The limits of a queue: how many of its messages may run at once, and how many may start in a time, in all and for each key.

In Redis they are the hash `limits`. Rates stand there as microseconds between two starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Self

import msgspec

from reliq.errors import ConfigurationError
from reliq.settings import whole
from reliq.wireformat import check_key

#: A rate permits at most this many starts in a second, and a key or a queue holds at most so many places.
STARTS_LIMIT, HELD_LIMIT = 10_000, 1_000_000
WEIGHT_LIMIT, WEIGHTS_LIMIT = 1000, 1000
#: Without a burst of its own a rate permits at once what it permits in this part of a second, and one at least.
BURST_PART = 10

_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_RATE = re.compile(r"([1-9][0-9]{0,7})/([smh])")
_WEIGHT = "weight:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    The limits that a queue declares, as keyword arguments of `Queue`; None is no limit.

    Attributes:
        ordered: one message of a key at a time, in the order in which they were published.
        per_key: at most this many messages of a key at once, over all processes (1..1,000,000).
        rate: how many messages may start in all: "100/s", "5/m" or "1000/h", at most 10,000 in a second.
        burst: how many of them at once after a pause; None for a tenth of a second's, and one at least.
        key_rate, key_burst: the same of each key.
        concurrency: at most this many messages at once, over all processes (1..1,000,000).
        key_weights: key -> how many messages it has in the turn in which others have one (1..1000, for 1000 keys).

    Raises:
        ConfigurationError: one of them is not allowed.
    """

    ordered: bool = False
    per_key: int | None = None
    rate: str | None = None
    burst: int | None = None
    key_rate: str | None = None
    key_burst: int | None = None
    concurrency: int | None = None
    key_weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.ordered, bool):
            raise ConfigurationError(f"ordered must be True or False, not {self.ordered!r:.40}")
        for name in ("per_key", "concurrency"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=1, most=HELD_LIMIT)
        if self.ordered and self.per_key not in (None, 1):
            raise ConfigurationError(
                f"ordered=True is one message of a key at a time: leave out per_key, which is {self.per_key}"
            )
        self._check_rate("rate", "burst")
        self._check_rate("key_rate", "key_burst")
        object.__setattr__(self, "key_weights", _weights(self.key_weights))

    @staticmethod
    def parse_rate(text: str, name: str = "rate") -> int:
        """
        Return the microseconds between two starts of a rate such as "100/s", rounded up: no more may start than it says.

        Raises:
            ConfigurationError: it is none; `name` is what it is called there.
        """
        found = _RATE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigurationError(
                f"{name} must be a number of messages for each second, minute or hour, such as '100/s', '5/m' or "
                f"'1000/h', not {text!r:.40}"
            )
        number, unit_us = int(found[1]), _UNIT_US[found[2]]
        if number * 1_000_000 > STARTS_LIMIT * unit_us:
            raise ConfigurationError(
                f"{name} must be at most {STARTS_LIMIT}/s, not {text!r}: for more leave it out, or limit concurrency"
            )
        return -(-unit_us // number)

    @classmethod
    def read(cls, stored: Mapping[Any, Any]) -> Self:
        """
        Return the limits that the hash `limits` holds, as bytes or as text; what is none of ours there is passed over.

        Raises:
            ConfigurationError: something else has written a value that is not allowed.
        """
        found = {_text(name): _text(value) for name, value in stored.items()}
        ordered = found.get("ordered") == "1"
        return cls(
            ordered=ordered,
            per_key=None if ordered else _number("per_key", found),
            rate=_rate("rate_us", found),
            burst=_number("burst", found),
            key_rate=_rate("key_rate_us", found),
            key_burst=_number("key_burst", found),
            concurrency=_number("concurrency", found),
            key_weights={
                name.removeprefix(_WEIGHT): _number(name, found) or 0 for name in found if name.startswith(_WEIGHT)
            },
        )

    def fields(self) -> dict[str, str]:
        """Return the fields of the hash `limits` that say this; `on` and `declared` are others'."""
        places = 1 if self.ordered else self.per_key
        said: dict[str, int | None] = {
            "ordered": 1 if self.ordered else None,
            "per_key": places,
            **self._rate_fields("rate", "burst"),
            **self._rate_fields("key_rate", "key_burst"),
            "concurrency": self.concurrency,
            "weighted": 1 if self.key_weights else None,
            **{_WEIGHT + key: weight for key, weight in self.key_weights.items()},
        }
        return {name: str(value) for name, value in said.items() if value is not None}

    @property
    def declared(self) -> str:
        """Tells these limits from others: a worker writes its own where another declaration stands."""
        return sha256(msgspec.json.encode(sorted(self.fields().items()))).hexdigest()[:16]

    def _check_rate(self, rate: str, burst: str) -> None:
        given: int | None = getattr(self, burst)
        if getattr(self, rate) is not None:
            self.parse_rate(getattr(self, rate), rate)
        elif given is not None:
            raise ConfigurationError(f"{burst} is for a rate: give {rate} too, such as {rate}='100/s', or leave it out")
        if given is not None:
            whole(burst, given, least=1, most=HELD_LIMIT)

    def _rate_fields(self, rate: str, burst: str) -> dict[str, int | None]:
        if getattr(self, rate) is None:
            return {}
        us = self.parse_rate(getattr(self, rate))
        return {f"{rate}_us": us, burst: getattr(self, burst) or max(1, _UNIT_US["s"] // (BURST_PART * us))}


def _weights(given: object) -> dict[str, int]:
    """Return the weights of keys; raise ConfigurationError for what is none."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"key_weights must be a mapping such as {{'vip': 4}}, not a {type(given).__name__}")
    whole("number of key_weights", len(given), most=WEIGHTS_LIMIT)
    return {
        check_key(key): whole(f"weight of {key!r}", value, least=1, most=WEIGHT_LIMIT) for key, value in given.items()
    }


def _rate(name: str, found: Mapping[str, str]) -> str | None:
    """Return a rate as somebody would write it: the fewest messages, in the shortest unit, that come to the same."""
    us = _number(name, found)
    if not us:
        return None
    for unit, unit_us in _UNIT_US.items():
        number = -(-unit_us // us)
        if -(-unit_us // number) == us:
            return f"{number}/{unit}"
    return f"{-(-_UNIT_US['h'] // us)}/h"


def _number(name: str, found: Mapping[str, str]) -> int | None:
    """Return a number of the hash; None for none."""
    text = found.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < len(str(2**53))):
        raise ConfigurationError(f"the limits in Redis have {text!r:.40} as {name}, which must be a whole number")
    return int(text)


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
