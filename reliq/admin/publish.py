"""Bodies as bytes, published as they are given."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.message import Outgoing
from reliq.publish.messages import Writer
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, LARGEST_BODY, MIB, QueueSettings
from reliq.text import chunked_by_size, pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from reliq.message import PublishOptions, Receipt
    from reliq.queue import Queue


def publish(queue: Queue[bytes], body: bytes, *, raw: bool, options: PublishOptions) -> Receipt:
    """Publish a body as it is; without `raw` it must be JSON, or BodyError is raised."""
    if not raw and not is_json(body):
        raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
    return queue.publish(body, **options)


def taker(queue: Queue[bytes]) -> Callable[[Outgoing[bytes]], bool]:
    """Return the test whether a message may be published in `queue`: a foreign program may have written what reliq refuses."""
    shards = queue.known_shards
    writer = Writer(shards, Codec(bytes), QueueSettings(max_body=LARGEST_BODY))

    def takes(order: Outgoing[bytes]) -> bool:
        try:
            made = writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        if made.line and not shards.is_keyed:
            shards.read(for_seconds=PUBLISH_SECONDS)
        return not (made.line and shards.map.served > 1)

    return takes


def is_json(body: bytes) -> bool:
    """Say whether `body` is one JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


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


OnError = Literal["stop", "skip"]
#: It is called with how many bytes of the file are done.
OnBytes = Callable[[int], None]

#: A line stays known for this many seconds after its end: the progress file does not have the lines of the one call that
#: was under way when a run was cut off.
WINDOW_SECONDS = DAY_SECONDS
#: At most this many malformed lines are named.
COMPLAINTS_LIMIT = 20
#: One call carries at most this many bytes of bodies.
CALL_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class FilePublished:
    """
    How many lines a file has, and how each ended.

    Attributes:
        lines: how many have a body; blank ones have none.
        published: how many this run published.
        before: how many an earlier run published, as the progress file or Redis says.
        cancelled: how many are not published because somebody cancelled them a short while ago.
        malformed: numbers of lines that are no JSON or too large, from 1, at most 20 of them.
        skipped: how many those are in all.
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


def publish_file(
    queue: Queue[bytes],
    path: Path,
    goal: str,
    options: PublishOptions,
    *,
    raw: bool,
    on_error: OnError,
    on_step: OnBytes,
) -> FilePublished:
    """Publish each line of a file; `goal` names the queue in the file's progress. See `LinesPublisher.publish`."""
    return LinesPublisher(queue, FileProgress(path, goal), options, raw=raw).publish(on_error, on_step)


class FileLine(NamedTuple):
    """
    One line with something in it.

    Attributes:
        number: from 1.
        body: what is in it, without the line's end; None when it is malformed.
        at: bytes of the file up to its end.
    """

    number: int
    body: bytes | None
    at: int


class LinesPublisher:
    """
    Publishes the lines of a file in one queue.

    Ids are made from the file's digest and the line's number, so a line that was published is known again.
    """

    def __init__(self, queue: Queue[bytes], progress: FileProgress, options: PublishOptions, *, raw: bool) -> None:
        self._queue, self._progress, self._raw = queue, progress, raw
        self._options = options
        if options.get("dedup") is None:
            self._options = {**options, "dedup": WINDOW_SECONDS}

    def publish(self, on_error: OnError, on_step: OnBytes) -> FilePublished:
        """
        Publish what earlier runs did not; tell `on_step` how many bytes of the file are done.

        Raises:
            BodyError: with `stop`, a line is malformed; nothing was published.
            ConfigurationError: the file cannot be read, or has changed since a part of it was published here.
            PublishFailed: Redis is away or refused; made again, it goes on.
        """
        sha256, malformed = self._check()
        if malformed and on_error == "stop":
            raise BodyError(
                f"{self._progress.path}: {_numbers(malformed)} not JSON, or larger than {LARGEST_BODY} bytes; "
                f"nothing was published. Mend the file, or publish the rest with --on-error skip"
            )
        done_before = self._progress.line(sha256)
        lines = published = before = cancelled = 0
        for chunk in self._chunks():
            fresh = [line for line in chunk if line.number > done_before]
            result = self._queue.publish_many(self._orders(fresh, sha256))
            lines += len(chunk)
            published += result.published
            before += len(chunk) - len(fresh) + len(result.duplicates)
            cancelled += len(result.tombstoned)
            if fresh:
                self._progress.save(sha256, chunk[-1].number)
            on_step(chunk[-1].at)
        return FilePublished(lines, published, before, cancelled, tuple(malformed[:COMPLAINTS_LIMIT]), len(malformed))

    def _check(self) -> tuple[str, list[int]]:
        """Return the file's digest and the numbers of its malformed lines."""
        digest = hashlib.sha256()
        with self._opened() as file:
            malformed = [line.number for line in self._lines(file, digest.update) if line.body is None]
        return digest.hexdigest(), malformed

    def _chunks(self) -> Iterator[list[FileLine]]:
        """Yield the good lines, as many at a time as one call carries."""
        with self._opened() as file:
            good = (line for line in self._lines(file, lambda _data: None) if line.body is not None)
            yield from chunked_by_size(good, lambda line: len(line.body or b""), CALL_BYTES, BATCH_LIMIT)

    def _orders(self, lines: list[FileLine], sha256: str) -> Iterator[Outgoing[bytes]]:
        for line in lines:
            if line.body is not None:
                options: PublishOptions = {**self._options, "id": f"{sha256[:20]}-{line.number}"}
                yield Outgoing(body=line.body, **options)

    def _lines(self, file: BinaryIO, on_data: Callable[[bytes], None]) -> Iterator[FileLine]:
        """Yield the lines that are not blank; of one that is too large only the start is held."""
        number = at = 0
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

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self._progress.path.open("rb") as file:
                yield file
        except OSError as error:
            raise ConfigurationError(f"cannot read {self._progress.path}: {error.strerror}") from None


def _numbers(malformed: list[int]) -> str:
    """Return the subject of a complaint about lines: `line 3 is`, `lines 3, 4 are`."""
    shown = ", ".join(map(str, malformed[:COMPLAINTS_LIMIT]))
    more = f" and {len(malformed) - COMPLAINTS_LIMIT} more" if len(malformed) > COMPLAINTS_LIMIT else ""
    return f"line {shown} is" if len(malformed) == 1 else f"lines {shown}{more} are"
