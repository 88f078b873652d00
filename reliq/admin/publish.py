"""Publish each line of a file, and check whether a body is JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Literal, Unpack

import msgspec

from reliq.admin.filters import ignore
from reliq.admin.session import AdminBase
from reliq.errors import BodyError, ConfigurationError
from reliq.message import OutgoingMessage
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, LARGEST_BODY, MIB
from reliq.text import chunked_by_size, pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reliq.message import PublishOptions, Receipt

OnError = Literal["stop", "skip"]

#: Redis remembers the id of a line for this many seconds after its message ended, for the case that the file is published again.
DEDUP_SECONDS = DAY_SECONDS
#: An error message names at most this many malformed lines.
COMPLAINTS_LIMIT = 20
#: A call to Redis carries at most this many bytes of bodies.
CALL_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class FilePublished:
    """
    How many lines a file has, and how each ended.

    Attributes:
        lines: lines with a body; blank lines have none.
        published: lines that this run published.
        before: lines that an earlier run published.
        cancelled: lines that are not published again because their messages were cancelled with a tombstone.
        malformed: numbers of the lines that are not JSON or are too large, from 1.
    """

    lines: int = 0
    published: int = 0
    before: int = 0
    cancelled: int = 0
    malformed: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the result of the good lines as one line of text."""
        parts = [f"{self.published} published", f"{pluralize(self.before, 'was', 'were')} before"]
        if self.cancelled:
            parts.append(f"{pluralize(self.cancelled, 'was', 'were')} cancelled a short while ago")
        return ", ".join(parts)


#: Called with how many bytes of the file one step has published, and the result so far.
OnLines = Callable[[int, FilePublished], None]


class PublishActions(AdminBase):
    """Publish messages."""

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a body as it is, as `Queue.publish` does; without `raw` it must be JSON, or BodyError is raised."""
        target = self._redis.publisher(queue)
        if not raw and not is_json(body):
            raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
        return target.publish(body, **options)

    def publish_lines(
        self,
        queue: str,
        path: Path,
        *,
        raw: bool = False,
        on_error: OnError = "stop",
        on_step: OnLines = ignore,
        **options: Unpack[PublishOptions],
    ) -> FilePublished:
        """
        Publish each line of a file; after an interruption, publish the file again: no line is published twice.

        Ids are made from the file's content and the line's number. Redis remembers each for `dedup`, by default a day
        after its message ended.

        Args:
            raw: accept lines that are not JSON.
            on_error: at a malformed line, `stop` publishes nothing, `skip` publishes the other lines.
            on_step: called after each step with its bytes of the file, and the result so far.
            options: options of `Queue.publish`, for every line.

        Raises:
            BodyError: with `stop`, a line is malformed.
            ConfigurationError: the file cannot be read.
            PublishFailed: Redis did not answer or refused; call again to go on.
        """
        target = self._redis.publisher(queue)
        if options.get("dedup") is None:
            options["dedup"] = DEDUP_SECONDS
        at = 0
        result = FilePublished()
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
                malformed = tuple(number for number, body, _ in _lines(file, raw=raw) if body is None)
                if malformed and on_error == "stop":
                    raise BodyError(_complaint(path, malformed))
                good = ((number, body, at) for number, body, at in _lines(file, raw=raw) if body is not None)
                for chunk in chunked_by_size(good, lambda line: len(line[1]), CALL_BYTES, BATCH_LIMIT):
                    messages = []
                    for number, body, _ in chunk:
                        options["id"] = f"{digest}-{number}"
                        messages.append(OutgoingMessage(body=body, **options))
                    sent = target.publish_many(messages)
                    result = FilePublished(
                        result.lines + len(chunk),
                        result.published + sent.published,
                        result.before + len(sent.duplicates),
                        result.cancelled + len(sent.tombstoned),
                    )
                    on_step(chunk[-1][2] - at, result)
                    at = chunk[-1][2]
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
        return replace(result, malformed=malformed)


def is_json(body: bytes) -> bool:
    """Return whether `body` is a single JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _lines(file: BinaryIO, *, raw: bool) -> Iterator[tuple[int, bytes | None, int]]:
    """
    Yield number, body and end (in bytes of the file) of each line that is not blank; a malformed line has no body.

    Of a line that is too large, only the start is held in memory.
    """
    file.seek(0)
    number = 0
    while line := file.readline(LARGEST_BODY + 2):
        number += 1
        body = line.strip(b"\r\n")
        is_good = len(body) <= LARGEST_BODY and (raw or is_json(body))
        while not line.endswith(b"\n") and (line := file.readline(LARGEST_BODY)):
            is_good = False
        if body.strip():
            yield number, body if is_good else None, file.tell()


def _complaint(path: Path, malformed: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, malformed[:COMPLAINTS_LIMIT]))
    more = f" and {len(malformed) - COMPLAINTS_LIMIT} more" if len(malformed) > COMPLAINTS_LIMIT else ""
    subject = f"line {shown} is" if len(malformed) == 1 else f"lines {shown}{more} are"
    return (
        f"{path}: {subject} not JSON, or larger than {LARGEST_BODY} bytes; nothing was published. Correct the file, or "
        "publish the other lines with --on-error skip"
    )
