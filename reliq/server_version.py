"""The release of a server, as it says it, and whether reliq can do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The oldest server whose commands the scripts can do with.
OLDEST_SERVER = (6, 2)


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    Which release a server says it is, in its INFO; the numbers are empty when it hides that.

    Valkey says two: the release of Redis whose commands it has, and its own.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Return what the section `server` of INFO says of `product`, `redis` or `valkey`."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Say whether the server is older than `release`; one that hides its version is not."""
        return bool(self.numbers) and self.numbers < release

    def check(self) -> None:
        """Raise ConfigurationError when the server is too old for reliq."""
        if self.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {self.text}")
