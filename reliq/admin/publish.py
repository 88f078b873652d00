"""
The lines of a file published as messages, and the check whether a queue accepts a message.

A file that was cut off goes on where it ended, without a second copy of any message: a progress file beside it has the
last line of each queue, and ids are made from the file's digest and the line's number.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from reliq.admin.filters import ignore
from reliq.errors import BodyError, ConfigurationError
from reliq.message import Outgoing
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, LARGEST_BODY, MIB
from reliq.text import chunked_by_size, pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.message import PublishOptions
    from reliq.queue import Queue


OnError = Literal["stop", "skip"]
#: It is called with how many bytes of the file are done.
OnBytes = Callable[[int], None]

SUFFIX = ".reliq-progress"
#: A published line is known for this many seconds after its message ended: the progress file lacks the lines of the call
#: that was under way when a run was cut off.
WINDOW_SECONDS = DAY_SECONDS
#: At most this many malformed lines are named.
COMPLAINTS_LIMIT = 20
#: One call carries at most this many bytes of bodies.
CALL_BYTES = 4 * MIB


def is_json(body: bytes) -> bool:
    """Say whether `body` is one JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class FilePublished:
    """
    How many lines a file has, and how each ended.

    Attributes:
        lines: how many have a body; blank lines have none.
        published: how many this run published.
        before: how many an earlier run published, as the progress file or Redis says.
        cancelled: how many are not published because they were cancelled a short while ago.
        malformed: numbers of lines that are no JSON or too large, from 1, at most 20 of them.
        skipped: how many malformed lines there are in all.
    """

    lines: int = 0
    published: int = 0
    before: int = 0
    cancelled: int = 0
    malformed: tuple[int, ...] = ()
    skipped: int = 0

    def __str__(self) -> str:
        """Return in one line what became of the good lines."""
        parts = [f"{self.published} published", f"{pluralize(self.before, 'was', 'were')} before"]
        if self.cancelled:
            parts.append(f"{pluralize(self.cancelled, 'was', 'were')} cancelled a short while ago")
        return ", ".join(parts)


class FileMark(msgspec.Struct, frozen=True):
    """The progress of a file in one queue: its digest then, and the last line that Redis has answered."""

    sha256: str
    line: int


@dataclass(frozen=True, slots=True)
class FileProgress:
    """
    The progress file of `path`. It has a mark for every `goal`: a queue, by its name and Redis.

    Raises:
        ConfigurationError: the file is no progress file, or cannot be read or written.
    """

    path: Path
    goal: str

    @property
    def file(self) -> Path:
        """The path of the progress file."""
        return self.path.with_name(self.path.name + SUFFIX)

    def line(self, sha256: str) -> int:
        """Return the last line that is done; raise ConfigurationError when the file has changed since."""
        mark = self._marks().get(self.goal)
        if mark is None:
            return 0
        if mark.sha256 != sha256:
            raise ConfigurationError(
                f"{self.path} has changed since {pluralize(mark.line, 'line of it was', 'lines of it were')} published here: all its lines would be "
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


class FileLine(NamedTuple):
    """
    One line that is not blank.

    Attributes:
        number: from 1.
        body: its text without the line's end; None when it is malformed.
        at: bytes of the file up to its end.
    """

    number: int
    body: bytes | None
    at: int


class LinesPublisher:
    """
    Publishes the lines of a file in one queue.

    Args:
        goal: names the queue in the progress file.
        raw: whether lines need not be JSON.
    """

    def __init__(self, queue: Queue[bytes], path: Path, goal: str, options: PublishOptions, *, raw: bool) -> None:
        self._queue = queue
        self._path = path
        self._progress = FileProgress(path, goal)
        self._raw = raw
        self._options = options
        if options.get("dedup") is None:
            self._options = {**options, "dedup": WINDOW_SECONDS}

    def publish(self, on_error: OnError, on_step: OnBytes) -> FilePublished:
        """
        Publish the lines that earlier runs did not; call `on_step` with how many bytes of the file are done.

        Raises:
            BodyError: with `stop`, a line is malformed; nothing was published.
            ConfigurationError: the file cannot be read, or has changed since a part of it was published here.
            PublishFailed: Redis is away or refused; called again, it goes on.
        """
        digest = hashlib.sha256()
        malformed = [line.number for line in self._lines(digest.update) if line.body is None]
        sha256 = digest.hexdigest()
        if malformed and on_error == "stop":
            shown = ", ".join(map(str, malformed[:COMPLAINTS_LIMIT]))
            more = f" and {len(malformed) - COMPLAINTS_LIMIT} more" if len(malformed) > COMPLAINTS_LIMIT else ""
            raise BodyError(
                f"{self._path}: {f'line {shown} is' if len(malformed) == 1 else f'lines {shown}{more} are'} not JSON, or "
                f"larger than {LARGEST_BODY} bytes; nothing was published. Mend the file, or publish the rest with "
                f"--on-error skip"
            )
        done_before = self._progress.line(sha256)
        lines = published = before = cancelled = 0
        good = ((line, line.body) for line in self._lines(ignore) if line.body is not None)
        for chunk in chunked_by_size(good, lambda row: len(row[1]), CALL_BYTES, BATCH_LIMIT):
            messages: list[Outgoing[bytes]] = []
            for line, body in chunk:
                if line.number > done_before:
                    options: PublishOptions = {**self._options, "id": f"{sha256[:20]}-{line.number}"}
                    messages.append(Outgoing(body=body, **options))
            result = self._queue.publish_many(messages)
            lines += len(chunk)
            published += result.published
            before += len(chunk) - len(messages) + len(result.duplicates)
            cancelled += len(result.tombstoned)
            last, _ = chunk[-1]
            if messages:
                self._progress.save(sha256, last.number)
            on_step(last.at)
        return FilePublished(lines, published, before, cancelled, tuple(malformed[:COMPLAINTS_LIMIT]), len(malformed))

    def _lines(self, on_data: Callable[[bytes], None]) -> Iterator[FileLine]:
        """Yield the lines that are not blank; of a line that is too large only the start is held in memory."""
        number = at = 0
        try:
            with self._path.open("rb") as file:
                while data := file.readline(LARGEST_BODY + 2):
                    number += 1
                    on_data(data)
                    at += len(data)
                    body: bytes | None = data.strip(b"\r\n")
                    while not data.endswith(b"\n") and (data := file.readline(LARGEST_BODY)):
                        on_data(data)
                        at += len(data)
                        body = None
                    if body is None or body.strip():
                        is_good = body is not None and len(body) <= LARGEST_BODY and (self._raw or is_json(body))
                        yield FileLine(number, body if is_good else None, at)
        except OSError as error:
            raise ConfigurationError(f"cannot read {self._path}: {error.strerror}") from None
