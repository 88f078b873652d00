"""`reliq show`: one message, or what became of it."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from reliq.cli.ends import clock, why
from reliq.cli.keys import why_waits
from reliq.cli.options import Json, QueueName, WholeDesk
from reliq.cli.output import print_facts, print_json, say
from reliq.errors import ConfigurationError
from reliq.failure_note import FailureNote
from reliq.foreign import moment
from reliq.readable import as_value, pretty, spoken

if TYPE_CHECKING:
    from reliq.admin import MessageView


def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the body's bytes to standard output, nothing else.")
    ] = False,
    json: Json = False,
    desk: WholeDesk,
) -> None:
    """
    Show where a message is, what it holds, what went wrong and who has it; or what became of it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage, an unknown queue or id, or --raw of a
    message whose body is gone.

    Example: reliq show orders order-42
    """
    found = desk.show(queue, id)
    if raw:
        if found.body is None:
            raise ConfigurationError(f"message {id[:128]!r} of queue {queue!r} has no body any more; leave --raw out")
        sys.stdout.buffer.write(found.body)
        sys.stdout.flush()
    elif json:
        print_json(_as_json(found))
    else:
        print_facts(_lines(found))
        if found.body is not None:
            say(*pretty(found.body))


def _lines(found: "MessageView") -> list[tuple[str, Any]]:
    """Return the names and values to show, each for one line."""
    said: list[tuple[str, Any]] = [("id", found.id), ("state", _state(found))]
    said += [("published", clock(found.published) + " UTC")] if found.published is not None else []
    said += [("due", clock(found.due) + " UTC")] if found.due is not None else []
    said += [("key", found.key)] if found.key else []
    said += [("priority", found.priority)] if found.priority != "normal" else []
    if found.state == "waiting":
        said += [("in its line", f"{found.ahead:,} come before it")] if found.ahead is not None else []
        said += [("it waits", why_waits(found.line))] if found.line is not None else []
    if found.holder is not None:
        holder = found.holder
        said.append(
            ("runs", f"for {spoken(holder.seconds)} in {holder.host} pid {holder.pid} (worker {holder.worker})")
        )
    if found.leased_until is not None:
        said.append(("lease", f"until {clock(found.leased_until)} UTC, unless it is renewed"))
    if found.deliveries is not None:
        said.append(("deliveries", f"{found.deliveries} (snoozed and released ones are not counted)"))
    said += [("retries left", found.retries_left)] if found.retries_left is not None else []
    said += [("expires", f"in {spoken(found.ttl_left)}")] if found.ttl_left is not None else []
    if found.reason:
        said.append(("last error", found.reason + (f": {found.error}" if found.error else "")))
    said += [("failed", _failure(note)) for note in reversed(found.failures)]
    said += [("header", f"{name}: {value}") for name, value in found.headers.items()]
    if found.taken_seconds is not None:
        said.append(("id taken", f"for {spoken(found.taken_seconds)} more"))
    said += [("ended", f"{end.kind} {clock(end.at)} UTC  {why(end)}".rstrip()) for end in found.ends]
    said += [("dead letter", f"{one.letter}, died {clock(one.died)} UTC") for one in found.letters]
    if not found.searched_all:
        said.append(("note", "there are too many dead letters to look through; an older one of it may be among them"))
    return said


def _failure(note: FailureNote) -> str:
    """Return one failure in a line: when, which delivery, where, and why."""
    said = [] if note.at_ms is None else [f"{clock(moment(note.at_ms / 1000))} UTC "]
    said += [] if note.attempt is None else [f"attempt {note.attempt}"]
    said += [] if note.took_ms is None else [f"after {spoken(note.took_ms / 1000)}"]
    said += [f"in {note.by}"] if note.by else []
    return " ".join([*said, note.summary])


def _state(found: "MessageView") -> str:
    if found.state == "finished" and not found.ends:
        return "finished: acked messages are not kept (set history= to keep them)"
    more = [word for word, holds in (("cancelled", found.cancelled), ("suspect", found.suspect)) if holds]
    if found.body is None and found.state != "finished" and not found.cancelled:
        more.append("its body is gone, so it will expire")
    return f"{found.state} ({', '.join(more)})" if more else found.state


def _as_json(found: "MessageView") -> dict[str, Any]:
    """Return the view with its bodies as JSON where they are JSON, else as text, else in base 64."""
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    letters = [{**msgspec.to_builtins(one), "payload": as_value(one.payload)} for one in found.letters]
    return {**fields, "body": None if found.body is None else as_value(found.body), "letters": letters}
