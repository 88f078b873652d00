"""The limits that a queue declares, taken out of its keyword arguments."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypedDict

from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from reliq.keys import Keys
    from reliq.limits import Limits


class LimitOptions(TypedDict, total=False):
    """The fields of `reliq.limits.Limits` as keyword arguments of `Queue`, for type checkers."""

    ordered: bool
    per_key: int | None
    rate: str | None
    burst: int | None
    key_rate: str | None
    key_burst: int | None
    concurrency: int | None
    key_weights: Mapping[str, int]


LIMITS = frozenset(LimitOptions.__annotations__)


def limits_in(options: MutableMapping[str, Any], keys: Keys, shards: int | None) -> Limits | None:
    """
    Take the limits of a queue out of its keyword arguments; None when it declares none.

    Raises:
        ConfigurationError: one is not allowed, or the queue can have none.
    """
    given = {name: options.pop(name) for name in LIMITS & options.keys()}
    if not given:
        return None
    limits: Limits = import_module("reliq.limits").Limits(**given)  # a queue without limits need not have them imported
    if not limits.fields():
        return None
    names = ", ".join(sorted(given))
    if keys.bare:
        raise ConfigurationError(
            f"{names}: a queue in the hdt3213 layout has no limits, for the Go original knows none"
        )
    if shards is not None and shards > 1:
        raise ConfigurationError(
            f"{names}: a queue of {shards} shards has no limits; leave `shards` out, or the limits"
        )
    return limits
