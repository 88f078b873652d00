"""Rate limits that several queues share, for example because their handlers call the same external service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError
from reliq.keys import QUEUE_NAME
from reliq.settings import BY_COST, Limits

if TYPE_CHECKING:
    from reliq.keys import Keys


@dataclass(frozen=True, slots=True)
class Limit:
    """
    A rate limit that several queues share: it limits how many of their messages start, over all workers.

    Pass it to each of these queues as `Queue(limits=[...])`. All these queues must use the same Redis.

    Args:
        name: the limit's name, 1 to 128 characters of A-Z a-z 0-9 _ . -.
        rate: how many messages may start per second, minute or hour, for example "100/s", "5/m" or "1000/h", at most
            10,000 per second. A rate by cost limits the sum of their costs instead, for example "100000/m by cost", at
            most 10,000,000 per second. A list may contain one rate of each kind.
        burst: how many messages may start at the same time after a quiet time, 1 to 1,000,000; for a rate by cost, the
            sum of their costs, at most 1,000,000,000. For a list of rates, a list of bursts. Default: None, which means
            the number that `rate` allows in 0.1 s, at least 1; for a rate by cost, a tenth of the number in `rate`.

    Attributes:
        starts: the burst of the rate that counts messages; 0 without such a rate.
        costs: the burst of the rate by cost; 0 without such a rate.
        declared: the three fields of the limit in Redis: the rates as text, the bursts as text, and both as numbers.

    Raises:
        ConfigurationError: an argument is not valid.

    Example: `OPENAI = Limit("openai", rate=["500/m", "200000/m by cost"])`
    """

    name: str
    rate: str | Sequence[str] = field(kw_only=True)
    burst: int | Sequence[int | None] | None = field(default=None, kw_only=True)
    starts: int = field(init=False, compare=False, repr=False)
    costs: int = field(init=False, compare=False, repr=False)
    declared: tuple[str, str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not QUEUE_NAME.fullmatch(self.name):
            raise ConfigurationError(f"a limit's name must be 1 to 128 of A-Z a-z 0-9 _ . -, not {self.name!r:.80}")
        try:
            limits = Limits(rate=self.rate, burst=self.burst)
        except ConfigurationError as error:
            raise ConfigurationError(f"limit {self.name!r}: {error}") from None
        if not limits.rate:
            raise ConfigurationError(f"limit {self.name!r}: rate must be given, such as '500/m', not {self.rate!r:.80}")
        fields = limits.fields()
        starts, costs = int(fields.get("burst", 0)), int(fields.get("cost_burst", 0))
        rates = limits.rate if isinstance(limits.rate, tuple) else (limits.rate,)
        buckets = f"{int(fields.get('rate_us', 0)) * 1000} {starts} {fields.get('cost_ns', 0)} {costs}"
        bursts = [str(costs if rate.endswith(BY_COST) else starts) for rate in rates]
        object.__setattr__(self, "rate", limits.rate)
        object.__setattr__(self, "burst", limits.burst)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "declared", (", ".join(rates), ", ".join(bursts), buckets))


def check_limits(limits: Sequence[Limit], keys: Keys) -> tuple[Limit, ...]:
    """Check the shared limits of a queue and return them; raise ConfigurationError if they are not valid."""
    if not isinstance(limits, Sequence) or not all(isinstance(limit, Limit) for limit in limits):
        raise ConfigurationError(f"limits must be a list such as [Limit('openai', rate='500/m')], not {limits!r:.80}")
    if len({limit.name for limit in limits}) < len(limits):
        raise ConfigurationError(f"limits must have different names, not {', '.join(limit.name for limit in limits)}")
    if limits and keys.bare:
        raise ConfigurationError("limits: a queue in the hdt3213 layout cannot have limits: the Go library has none")
    return tuple(limits)
