"""How far a file was published, in a file beside it: written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from reliq.errors import ConfigurationError
from reliq.text import count_of

SUFFIX = ".reliq-progress"


class FileMark(msgspec.Struct, frozen=True):
    """How far a file went into one queue: its digest then, and the last line of which Redis said what became of it."""

    sha256: str
    line: int


@dataclass(frozen=True, slots=True)
class FileProgress:
    """
    The progress file of `path`. It remembers every queue, by its name and Redis, that the file went into.

    Raises:
        ConfigurationError: what lies there is no progress file, or cannot be read or written.
    """

    path: Path
    goal: str

    @property
    def file(self) -> Path:
        """Where it lies."""
        return self.path.with_name(self.path.name + SUFFIX)

    def line(self, sha256: str) -> int:
        """Return the last line that is done; raise ConfigurationError when the file was another then."""
        mark = self._marks().get(self.goal)
        if mark is None:
            return 0
        if mark.sha256 != sha256:
            raise ConfigurationError(
                f"{self.path} has changed since {count_of(mark.line, 'line of it was', 'lines of it were')} published here: all its lines would be "
                f"published again. If that is wanted, delete {self.file}"
            )
        return mark.line

    def save(self, sha256: str, line: int) -> None:
        """Note that all lines up to `line` are done."""
        marks = {**self._marks(), self.goal: FileMark(sha256, line)}
        temporary = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=self.file.name, delete=False) as new:
                temporary = new.name
                new.write(msgspec.json.encode(marks))
                new.flush()
                os.fsync(new.fileno())
            Path(temporary).replace(self.file)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise ConfigurationError(
                f"cannot write {self.file} ({error.strerror}); it is needed to go on after an interruption: "
                f"copy the file to a folder that can be written"
            ) from None

    def _marks(self) -> dict[str, FileMark]:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, FileMark])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.file}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ConfigurationError(f"{self.file} is not a progress file of reliq; move it away") from None
