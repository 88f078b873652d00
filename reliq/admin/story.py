"""The story of one message: when it was published, how each delivery ended as far as it is known, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.show import MessageState, MessageView

StoryKind = Literal["published", "failed", "claimed", "due", "dead", "expired", "cancelled", "purged", "acked"]


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """
    Something that happened to a message.

    Attributes:
        at: when, in unix seconds, by Redis' clock but for `published` of a generated id, and `claimed`; None when
            nobody knows.
        kind: `published`; `failed`, a delivery; `claimed`, the delivery that runs; `due`, the next delivery; or how it
            ended, as `End` says.
        attempt: which delivery, 1 for the first; None when nobody knows.
        by: the process that ran the handler, as host:pid; empty when nobody says.
        reason: of a failure, one of `DEATH_REASONS`.
        raised: class and place of the exception, which hold no piece of a body; empty when nothing was raised.
        error: its text; it may hold a piece of the body.
        took: for how many seconds the handler ran; None when nobody says.
    """

    at: float | None
    kind: StoryKind
    attempt: int | None = None
    by: str = ""
    reason: str = ""
    raised: str = ""
    error: str = ""
    took: float | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """
    A message from its publish on.

    Attributes:
        state: as `MessageView` has it.
        events: the oldest first; of failures the newest ten.
    """

    queue: str
    id: str
    state: MessageState
    events: Sequence[StoryEvent]


def story_of(view: MessageView) -> Story:
    """Return what a view of a message says, in the order of time; what has no time stays behind what it followed."""
    events = [_published(view), *_failed(view), *_ended(view), *_present(view)]
    times, last = list[float](), 0.0
    for event in events:
        last = last if event.at is None else event.at
        times.append(last)
    ordered = sorted(zip(times, events, strict=True), key=lambda pair: pair[0])
    return Story(view.queue, view.id, view.state, [event for _, event in ordered])


def _published(view: MessageView) -> StoryEvent:
    return StoryEvent(view.published, "published")


def _failed(view: MessageView) -> Iterator[StoryEvent]:
    for note in reversed(view.failures):
        at = None if note.at_ms is None else note.at_ms / 1000
        took = None if note.took_ms is None else note.took_ms / 1000
        yield StoryEvent(at, "failed", note.attempt, note.by, note.reason, note.raised, note.error, took)


def _present(view: MessageView) -> Iterator[StoryEvent]:
    holder = view.holder
    if holder is not None:
        yield StoryEvent(holder.started, "claimed", holder.attempt, f"{holder.host}:{holder.pid}")
    elif view.state == "leased":
        yield StoryEvent(None, "claimed", view.deliveries)
    elif view.due is not None and view.state in ("pending", "backoff"):
        yield StoryEvent(view.due, "due")


def _ended(view: MessageView) -> Iterator[StoryEvent]:
    for end in reversed(view.ends):
        yield StoryEvent(end.at, end.kind, end.attempt, "", end.reason, "", end.error, end.took)
    known = {end.letter for end in view.ends}
    for letter in reversed(view.letters):
        if letter.letter not in known:
            yield StoryEvent(letter.died, "dead", letter.attempts, "", letter.reason, letter.raised, letter.error)
