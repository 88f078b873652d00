"""What an operator does with messages and dead letters, as methods; the work is done by the modules beside it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

from reliq import commands, control, transitions
from reliq.admin import dead as letters
from reliq.admin import pieces
from reliq.admin import publish as publishing
from reliq.admin import remove as bulk
from reliq.admin.existing import check_known
from reliq.admin.file_progress import Progress
from reliq.admin.filters import Filter, LetterFilter
from reliq.admin.list import browse
from reliq.admin.move import MOVABLE, Moved, Mover
from reliq.admin.publish_file import LinesPublisher
from reliq.admin.session import Ground
from reliq.errors import ConfigurationError
from reliq.ids import check_id
from reliq.queue import Queue
from reliq.settings import BATCH_LIMIT, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from reliq.admin.dead import Redriven, Terms
    from reliq.admin.list import Entry
    from reliq.admin.publish_file import FilePublished, OnError
    from reliq.admin.remove import Removed
    from reliq.message import CancelStatus, Duration, Letter, Pause, PublishOptions, Receipt

#: Most messages of one list.
LIST_LIMIT = 10_000
#: What is meant when nothing is said.
EVERYTHING, EVERY_LETTER = Filter(), LetterFilter()
PURGEABLE: tuple[pieces.State, ...] = ("pending", "ready", "unack", "retry", "garbage")


def _ignore(*_seen: Any) -> None:
    """Nobody wants to know how far it is."""


class Acting(Ground):
    """List, publish, cancel, purge, move, redrive, pause."""

    def messages(
        self,
        queue: str,
        state: str,
        *,
        limit: int = 20,
        offset: int = 0,
        where: Filter = EVERYTHING,
        on_look: Callable[[int], None] = _ignore,
    ) -> list[Entry]:
        """
        Return messages of a state, what comes first first; `on_look` is told how many each step looked at.

        Raises:
            ConfigurationError: an unknown queue, a state that is none, or a number that is not allowed.
        """
        place, at = pieces.check_state(state), whole("offset", offset, most=10**9)
        most = whole("limit", limit, least=1, most=LIST_LIMIT)
        client, keys = self._known(queue)
        return list(islice(browse(client, keys, place, where, offset=at, on_look=on_look), most))

    def size(self, queue: str, state: str) -> int:
        """Return how many messages a state has."""
        place = pieces.check_state(state)
        client, keys = self._known(queue)
        return client.run(pieces.size(keys, place), for_seconds=pieces.TRY_SECONDS)

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """
        Publish a body as it is; without `raw` it must be JSON. Return what became of it.

        The options are those of `Queue.publish`; None means what a queue has by default.

        Raises:
            ConfigurationError, BodyError, PublishFailed: as `Queue.publish`.
        """
        if not raw:
            publishing.check_json(body)
        return self._queue(queue).publish(body, **options)

    def publish_lines(
        self,
        queue: str,
        path: Path,
        *,
        raw: bool = False,
        on_error: OnError = "stop",
        on_step: Callable[[int], None] = _ignore,
        **options: Unpack[PublishOptions],
    ) -> FilePublished:
        """
        Publish each line of a file, so that doing it again adds nothing twice; see `LinesPublisher.publish`.

        The options are those of `Queue.publish`, but `id`: the ids are made from the file and the line's number.
        With `stop` nothing is published when a line is malformed, with `skip` the others are.
        """
        target = self._queue(queue)
        publisher = LinesPublisher(target, Progress(path, f"{target.keys.pending} at {self.place}"), options, raw=raw)
        return publisher.publish(on_error, on_step)

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return for each `cancelled`, `running` (its handler is told) or `not_found`.

        The id of a `cancelled` one is free at once, but with `tombstone`: for so long a publish of it is refused. That of
        a `running` one stays taken until its end, and for its `dedup` then.
        """
        for_ms = control.tombstone_ms(tombstone)
        checked = [check_id(id) for id in dict.fromkeys(ids)]
        client, keys = self._known(queue)
        parts = [checked[at : at + BATCH_LIMIT] for at in range(0, len(checked), BATCH_LIMIT)]
        answers = [word for part in parts for word in bulk.cancel_ids(client, keys, part, tombstone_ms=for_ms)]
        return dict(zip(checked, answers, strict=True))

    def count_messages(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: Callable[[int, Removed], None] = _ignore
    ) -> int:
        """Count the messages of a state, except dead, that are meant: what the next three would act on."""
        place = pieces.check_state(state, PURGEABLE)
        client, keys = self._known(queue)
        return bulk.count(client, keys, place, where, on_step)

    def cancel_where(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        tombstone: Duration | None = None,
        on_step: Callable[[int, Removed], None] = _ignore,
    ) -> Removed:
        """Cancel the messages of a state that are meant; `on_step` is told how many were looked at, and the sum."""
        place = pieces.check_state(state, bulk.CANCELLABLE)
        client, keys = self._known(queue)
        return bulk.cancel(client, keys, place, where, on_step, tombstone_ms=control.tombstone_ms(tombstone))

    def purge(
        self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: Callable[[int, Removed], None] = _ignore
    ) -> Removed:
        """Delete the messages of a state, except dead, that are meant; `on_step` as for `cancel_where`."""
        place = pieces.check_state(state, PURGEABLE)
        client, keys = self._known(queue)
        return bulk.purge(client, keys, place, where, on_step)

    def move(
        self,
        queue: str,
        to: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        limit: int | None = None,
        on_step: Callable[[int, Moved], None] = _ignore,
    ) -> Moved:
        """
        Move messages of a state to another queue, at most `limit`; cut off at any point, make it again to finish it.

        Raises:
            ConfigurationError: an unknown queue or state, or a move to a third queue was cut off.
            PublishFailed: Redis is away or refused; made again, it goes on.
        """
        place = pieces.check_state(state, MOVABLE)
        most = None if limit is None else whole("limit", limit, least=1, most=10**9)
        client, keys = self._known(queue)
        return Mover(client, keys, self._other(queue, to)).move(place, where, most, on_step)

    def letters(self, queue: str, where: LetterFilter = EVERY_LETTER) -> Iterator[Letter]:
        """Yield the dead letters that are meant, oldest first, read as they are asked for."""
        client, keys = self._known(queue)
        return (letter for _, some in letters.walk_letters(client, keys, where) for letter in some)

    def count_letters(
        self, queue: str, where: LetterFilter = EVERY_LETTER, *, on_step: Callable[[int, int], None] = _ignore
    ) -> int:
        """Count the dead letters that are meant; `on_step` is told how many each step looked at, and the sum."""
        client, keys = self._known(queue)
        return letters.count(client, keys, where, on_step)

    def redrive(
        self,
        queue: str,
        where: LetterFilter,
        terms: Terms,
        *,
        to: str | None = None,
        on_step: Callable[[int, Redriven], None] = _ignore,
    ) -> Redriven:
        """
        Publish dead letters again, oldest first, in their queue or in `to`; `on_step` is told of each step and the sum.

        Each step is whole: cut off at any point, nothing is lost, and made again it goes on with the rest.
        """
        client, keys = self._known(queue)
        return letters.redrive(client, keys, where, terms, None if to is None else self._other(queue, to), on_step)

    def delete_letters(self, queue: str, where: LetterFilter, *, on_step: Callable[[int, int], None] = _ignore) -> int:
        """Delete dead letters; return how many. `on_step` as for `count_letters`."""
        client, keys = self._known(queue)
        return letters.delete(client, keys, where, on_step)

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None) -> None:
        """Have consumers stop claiming within a second, for a while or until `resume`; running handlers finish."""
        request = control.pausing(self.keys(queue), reason, for_)
        self._known(queue)
        self._ask(request)

    def resume(self, queue: str) -> bool:
        """Have consumers claim again; return whether the queue was paused."""
        _client, keys = self._known(queue)
        return bool(self._ask(transitions.resume(keys)))

    def paused(self, queue: str) -> Pause | None:
        """Return who paused a queue, when and why; None when it is not paused."""
        pause: Pause | None = self._ask(commands.paused(self.keys(queue)))
        return pause

    def _other(self, queue: str, to: str) -> Queue[bytes]:
        """Return the queue that messages go to; raise ConfigurationError for the same, or one that nobody knows."""
        if to == queue:
            raise ConfigurationError(f"the other queue must be another than {queue!r}")
        keys = self.keys(to)
        try:
            check_known(self._client(), keys, pieces.TRY_SECONDS)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; messages go to a queue that was published to or worked before"
            ) from None
        return self._queue(to)

    def _queue(self, name: str) -> Queue[bytes]:
        return Queue(name, bytes, url=self._target, layout=self._layout, max_body=publishing.LARGEST_BODY)
