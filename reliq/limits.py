"""Limits that several queues share, such as the rate limit of a provider."""

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
    A rate limit that several queues share: it counts the starts of all their messages together, over all workers.

    Give it to each queue, as `Queue(limits=[...])`. All queues of a limit must be in the same Redis.

    Args:
        name: the limit's name, 1 to 128 characters of A-Z a-z 0-9 _ . -.
        rate: how many messages may start per time: "100/s", "5/m" or "1000/h", at most 10,000 per second; or their
            total cost per time: "100000/m by cost", at most 10,000,000 per second; or a list with a rate of each kind.
        burst: how many messages may start at the same time after a pause, 1 to 1,000,000; for a rate by cost, their
            total cost, at most 1,000,000,000. With a list of rates, a list of bursts. Default: None, which means the
            number that `rate` allows in 0.1 s, at least 1; for a rate by cost, a tenth of the number in it.

    Attributes:
        starts: the burst of starts; 0 without a rate of starts.
        costs: the burst by cost; 0 without a rate by cost.
        declared: the limit's three fields in Redis: the rates as text, the bursts as text, and both as numbers.

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
    """Return a queue's shared limits; raise ConfigurationError if they are not valid for this queue."""
    if not isinstance(limits, Sequence) or not all(isinstance(limit, Limit) for limit in limits):
        raise ConfigurationError(f"limits must be a list such as [Limit('openai', rate='500/m')], not {limits!r:.80}")
    if len({limit.name for limit in limits}) < len(limits):
        raise ConfigurationError(f"limits must have different names, not {', '.join(limit.name for limit in limits)}")
    if limits and keys.bare:
        raise ConfigurationError("limits: a queue in the hdt3213 layout cannot have limits: the Go library has none")
    return tuple(limits)
