"""A message in the outbox: what a publish sends, kept until a relay sends it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from reliq.errors import ConfigurationError
from reliq.settings import Durability

#: The kinds of durability, and its other fields: count, local, ms of the time-out.
DurabilityTerms = tuple[str, int, bool, int]


class RowTerms(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    On which terms a message is published (times in ms), as JSON in its row.

    A relay that is older than what it reads refuses the row, for it would drop what it does not know.

    Attributes:
        window_ms: for how long a chosen id stays taken after its end; None for a generated one.
        durability: kind, count, local, and ms of the time-out; None for none.
        keyed: whether its envelope names a key or a priority.
    """

    ttl_ms: int
    retries: int
    delay_ms: int = 0
    at_ms: int | None = None
    window_ms: int | None = None
    replace: bool = False
    durability: DurabilityTerms | None = None
    keyed: bool = False

    def text(self) -> str:
        """Return the terms as they stand in a row."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> RowTerms:
        """Return what a row says; raise ConfigurationError when this version does not understand it."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"the terms of the row are none that this version knows: {error}") from None

    @property
    def confirmation(self) -> Durability:
        """Who must have the message before it counts as sent."""
        if self.durability is None:
            return Durability.NONE
        kind, count, local, timeout_ms = self.durability
        if kind == "replicas":
            return Durability.replicas(count, timeout_ms / 1000)
        return Durability.aof(local=local, replicas=count, timeout=timeout_ms / 1000)


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """
    One message of the outbox.

    Attributes:
        queue: its entry in the registry, which says the layout too.
        value: what a publish sends: the rest of the envelope and the body, or a bare body.
    """

    queue: str
    id: str
    value: bytes
    terms: RowTerms
