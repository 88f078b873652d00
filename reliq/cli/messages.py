"""`reliq list`: the messages of one state."""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

import reliq.admin
from reliq.admin.calls import CANCELLABLE, MOVABLE, PLACES, check_place
from reliq.admin.filters import duration, headers_of
from reliq.cli.keys import why_waits
from reliq.cli.options import (
    AdminOption,
    DryRun,
    Json,
    QueueName,
    Which,
    WholeQueueAdmin,
    Yes,
    queue_names,
    state_option,
)
from reliq.cli.output import (
    EXIT_UNKNOWN_ID,
    complain,
    confirm,
    print_facts,
    print_found,
    print_json,
    print_table,
    progress_bar,
    say,
)
from reliq.cli.queues import clock, why
from reliq.errors import ConfigurationError
from reliq.message import PublishOptions
from reliq.settings import LARGEST_BODY
from reliq.text import as_value, clamp_time, format_duration, pretty, shell_command, start_of
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from reliq.admin import Admin, FilePublished, Filter, MessageView, RemoveResult
    from reliq.admin.messages import Entry
    from reliq.admin.publish import OnError
    from reliq.message import Priority


#: Characters of a body in a table and in JSON; `reliq show` has all of it.
TABLE_BODY, JSON_BODY = 60, 1000
TABLE_ERROR = 60
MESSAGE_COLUMNS = ("id", "", "when", "attempt", "left", "size", "key", "body", "error")


def list_messages(
    queue: QueueName,
    *,
    state: Annotated[
        str, typer.Option(help=f"{', '.join(PLACES[:-1])} or {PLACES[-1]}.", autocompletion=state_option(PLACES))
    ] = "",
    limit: Annotated[int, typer.Option(help="The most to show.")] = 20,
    offset: Annotated[int, typer.Option(help="How many to pass over first.")] = 0,
    where: Which,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    List the messages of one state, the next to come first.

    Example: reliq list orders --state unack --match '"number": 42'

    Without --state those of ready; with --key those that wait in the line of the key. `when` is the due time; of unack
    the end of the lease or the redelivery, of dead the death. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown
    queue or state.
    """
    state = state or ("waiting" if where.key else "ready")
    total = admin.size(queue, state, key=where.key) if where.is_set else None
    with progress_bar("looking", total, None, lambda _none: "nothing was changed") as run:
        found = admin.messages(
            queue, state, limit=limit, offset=offset, where=where, on_look=lambda looked: run.step(looked, None)
        )
    if json:
        print_json([as_json(one) for one in found])
    elif not found:
        say(f"no {'more ' * bool(offset)}{state} messages in {queue}{' that match' * where.is_set}")
    else:
        without = {"key"} - {"key" for one in found if one.key}
        rows = [dict(zip(MESSAGE_COLUMNS, _row(one), strict=True)) for one in found]
        shown = [name for name in MESSAGE_COLUMNS if name not in without]
        print_table(shown, [[row[name] for name in shown] for row in rows], long=("body", "error"))


def as_json(entry: "Entry") -> dict[str, Any]:
    """Return an entry as JSON holds it, the start of its body as text."""
    names = ("id", "state", "mark", "when", "attempt", "retries_left", "error", "key", "headers", "size", "letter")
    return {name: getattr(entry, name) for name in names} | {"body": start_of(entry.body, JSON_BODY)}


def when_text(when: float | None) -> str:
    """Return a time as a person on call says it."""
    if when is None:
        return ""
    away = when - time.time()
    return f"in {format_duration(away)}" if away > 0 else f"{format_duration(-away)} ago"


def _row(entry: "Entry") -> tuple[Any, ...]:
    size = "gone" if entry.size is None else entry.size
    body, error = start_of(entry.body, TABLE_BODY), entry.error[:TABLE_ERROR]
    when = when_text(entry.when)
    return entry.id, entry.mark, when, entry.attempt, entry.retries_left, size, entry.key, body, error


def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the body's bytes to standard output, nothing else.")
    ] = False,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Show where a message is, what it holds, what went wrong and who has it; or what became of it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage, an unknown queue or id, or --raw of a
    message whose body is gone.

    Example: reliq show orders order-42
    """
    found = admin.show(queue, id)
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
            (
                "runs",
                f"for {format_duration(holder.seconds)} in {holder.host} pid {holder.pid} (worker {holder.worker})",
            )
        )
    if found.leased_until is not None:
        said.append(("lease", f"until {clock(found.leased_until)} UTC, unless it is renewed"))
    if found.deliveries is not None:
        said.append(("deliveries", f"{found.deliveries} (snoozed and released ones are not counted)"))
    said += [("retries left", found.retries_left)] if found.retries_left is not None else []
    said += [("expires", f"in {format_duration(found.ttl_left)}")] if found.ttl_left is not None else []
    if found.reason:
        said.append(("last error", found.reason + (f": {found.error}" if found.error else "")))
    said += [("failed", _failure(note)) for note in reversed(found.failures)]
    said += [("header", f"{name}: {value}") for name, value in found.headers.items()]
    if found.taken_seconds is not None:
        said.append(("id taken", f"for {format_duration(found.taken_seconds)} more"))
    said += [("ended", f"{end.kind} {clock(end.at)} UTC  {why(end)}".rstrip()) for end in found.ends]
    said += [("dead letter", f"{one.letter}, died {clock(one.died)} UTC") for one in found.letters]
    if not found.searched_all:
        said.append(("note", "there are too many dead letters to look through; an older one of it may be among them"))
    return said


def _failure(note: FailureNote) -> str:
    """Return one failure in a line: when, which delivery, where, and why."""
    said = [] if note.at_ms is None else [f"{clock(clamp_time(note.at_ms / 1000))} UTC "]
    said += [] if note.attempt is None else [f"attempt {note.attempt}"]
    said += [] if note.took_ms is None else [f"after {format_duration(note.took_ms / 1000)}"]
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


Tombstone = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Refuse a publish of these ids for this time.", show_default=False),
]


def cancel(
    queue: QueueName,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Messages.")] = None,
    *,
    state: Annotated[
        str, typer.Option(help="Instead of ids: " + " | ".join(CANCELLABLE), autocompletion=state_option(CANCELLABLE))
    ] = "",
    where: Which,
    tombstone: Tombstone = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Cancel messages: they do not start; one that runs is not retried, and its handler is told.

    The id of a `cancelled` one is free at once, that of a `running` one stays taken until its end and its `dedup`.

    Example: reliq cancel orders order-42 order-43

    Instead of ids: reliq cancel orders --state pending --match '"tenant":"acme"' --dry-run. Exit codes: 0 cancelled
    or running, 1 Redis did not answer or you did not agree, 2 an unknown queue or id, 130 interrupted.
    """
    if bool(ids) == bool(state):
        raise ConfigurationError("say which messages: ids, or --state with --header, --match or --key")
    if state:
        _cancel_where(admin, queue, state, where, tombstone=tombstone, dry_run=dry_run, yes=yes, json=json)
        return
    if where.is_set or dry_run:
        raise ConfigurationError("--header, --match, --key and --dry-run go with --state, not with ids")
    answers = admin.cancel(queue, ids or [], tombstone=tombstone)
    if json:
        print_json(answers)
    else:
        for id, word in answers.items():
            say(f"{word} {id}")
    if "not_found" in answers.values():
        raise typer.Exit(EXIT_UNKNOWN_ID)


def _cancel_where(
    admin: "Admin",
    queue: str,
    state: str,
    where: "Filter",
    *,
    tombstone: float | None,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    total = admin.size(queue, check_place(state, CANCELLABLE), key=where.key)
    if dry_run:
        with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was cancelled") as run:
            found = admin.count_messages(queue, state, where, on_step=run.step)
        print_found(found, "cancelled", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Cancel the {state} messages of {queue}, {what}?", yes=yes)
    with progress_bar("cancelling", total, reliq.admin.RemoveResult(), lambda done: done.summary("cancelled")) as run:
        done = admin.cancel_where(queue, state, where, tombstone=tombstone, on_step=run.step)
    print_json(done) if json else say(done.summary("cancelled"))


def purge(
    queue: QueueName,
    *,
    state: Annotated[str, typer.Option(help=" | ".join(PLACES), autocompletion=state_option(PLACES))] = "",
    where: Which,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Delete the messages of one state for good; say --dry-run first.

    Example: reliq purge orders --state ready --match '"tenant":"acme"' --dry-run

    With --key alone those are meant that wait in the line of the key: reliq purge mail --key tenant-7. What lies in the
    middle of a list is cancelled: its body goes at once, its id when a worker meets it. Exit codes: 0 done, 1 Redis did
    not answer or you did not agree, 2 an unknown queue or state, 130 interrupted.
    """
    state = state or ("waiting" if where.key else "")
    if not state:
        raise ConfigurationError("say which messages: --state, or --key for those that wait in the line of a key")
    total = admin.size(queue, state, key=where.key)
    if dry_run:
        print_found(_count(admin, queue, state, where, total), "deleted", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Delete the {state} messages of {queue}, {what}?", yes=yes)
    done = _delete(admin, queue, state, where, total)
    print_json(done) if json else say(done)


def _count(admin: "Admin", queue: str, state: str, where: "Filter", total: int) -> int:
    with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was deleted") as run:
        if state != "dead":
            return admin.count_messages(queue, state, where, on_step=run.step)
        return admin.count_letters(
            queue, where.of_letters(), on_step=lambda looked, _sum: run.step(looked, reliq.admin.RemoveResult())
        )


def _delete(admin: "Admin", queue: str, state: str, where: "Filter", total: int) -> "RemoveResult":
    with progress_bar("deleting", total, reliq.admin.RemoveResult()) as run:
        if state != "dead":
            return admin.purge(queue, state, where, on_step=run.step)
        admin.delete_letters(
            queue,
            where.of_letters(),
            on_step=lambda looked, done: run.step(looked, reliq.admin.RemoveResult(found=done, purged=done)),
        )
        return run.sum


def move(
    queue: QueueName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The queue that gets them.", autocompletion=queue_names)
    ],
    *,
    state: Annotated[str, typer.Option(help=" | ".join(MOVABLE), autocompletion=state_option(MOVABLE))],
    where: Which,
    limit: Annotated[int | None, typer.Option(help="The most to move.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Move messages of one state to another queue, with ids, due times, retries left and headers.

    Example: reliq move orders orders-slow --state ready --header tenant=acme --dry-run

    Cut off at any point, even by a kill, nothing is lost and nothing runs twice: make the same move again to finish
    it. Dead letters go by `reliq dead redrive --to`. Exit codes: 0 done, 1 Redis did not answer or you did not
    agree, 2 an unknown queue or state, 130 interrupted.
    """
    if state == "dead":
        raise ConfigurationError(
            f"dead letters go by `{shell_command('dead redrive', queue, options=['--to', other], layout=admin.redis_keys(queue).layout)}`"
        )
    total = admin.size(queue, check_place(state, MOVABLE), key=where.key)
    if dry_run:
        with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was moved") as looking:
            found = admin.count_messages(queue, state, where, on_step=looking.step)
        print_found(found if limit is None else min(found, limit), "moved", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Move the {state} messages of {queue} to {other}, {what}?", yes=yes)
    with progress_bar("moving", total, reliq.admin.MoveResult()) as moving:
        done = admin.move(queue, other, state, where, limit=limit, on_step=moving.step)
    print_json(done) if json else say(done)


EXIT_NOT_PUBLISHED = 3
EXAMPLE = "2026-11-21T03:00+01:00"


def publish(
    queue: QueueName,
    body: Annotated[str | None, typer.Argument(help="JSON, sent as it is written; `-` reads it from stdin.")] = None,
    *,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Publish each line of a file as a body.")] = None,
    on_error: Annotated[str, typer.Option(help="At a malformed line: stop, publish nothing; or skip it.")] = "stop",
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes as they are, JSON or not.")] = False,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    at: Annotated[str | None, typer.Option(metavar="WHEN", help=f"Due then, such as {EXAMPLE}.")] = None,
    retries: Annotated[int | None, typer.Option(help="Deliveries after the first, instead of 12.")] = None,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="How late it may start, instead of 7d.")] = None,
    id: Annotated[str | None, typer.Option(help="An id of yours: not published again while it is known.")] = None,
    dedup: Annotated[str | None, typer.Option(metavar="TIME", help="How long the id is known after its end.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given again.")] = None,
    key: Annotated[str | None, typer.Option(help="Whose message it is: limits and order hold for each key.")] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low; without --key.")] = "normal",
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Publish a message and say what became of it.

    Example: reliq publish reports '{}' --id report-2026-11-21 --dedup 86400

    With --jsonl run it again after an interruption: FILE.reliq-progress says how far it came, and no line is
    published twice. Exit codes: 0 published, or all lines are; 1 Redis did not answer or refused; 2 a wrong option,
    an unreadable file, a body or line that is no JSON; 3 nothing was published, for the id is taken or tombstoned.
    """
    if dedup is not None and id is None and jsonl is None:
        raise ConfigurationError(f"--dedup needs an id of yours: --id report-7 --dedup {dedup}")
    options: PublishOptions = {
        "delay": duration(delay),
        "at": None if at is None else _moment(at),
        "retries": retries,
        "ttl": None if ttl is None else duration(ttl),
        "headers": headers_of(header),
        "dedup": None if dedup is None else duration(dedup),
        "id": id,
        "key": key,
        "priority": cast("Priority", priority),
    }
    if jsonl is None:
        receipt = admin.publish(queue, _body(body), raw=raw, **options)
        print_json(receipt) if json else say(f"{receipt.status} {receipt.id}")
        if not receipt:
            raise typer.Exit(EXIT_NOT_PUBLISHED)
        return
    if body is not None or id is not None:
        raise ConfigurationError("--jsonl takes bodies and ids from the file: leave out BODY and --id")
    done = _publish_lines(admin, queue, jsonl, options, raw=raw, on_error=_on_error(on_error))
    print_json(done) if json else say(done)
    if done.skipped:
        numbers = ", ".join(map(str, done.malformed)) + (", …" if done.skipped > len(done.malformed) else "")
        complain(f"{done.skipped} malformed lines were skipped: {numbers}")
    if done.cancelled and not done.published + done.before:
        raise typer.Exit(EXIT_NOT_PUBLISHED)


def _publish_lines(
    admin: "Admin", queue: str, path: Path, options: PublishOptions, *, raw: bool, on_error: "OnError"
) -> "FilePublished":
    total = path.stat().st_size if path.is_file() else None
    with progress_bar("bytes", total, 0, lambda _at: "what is confirmed is in the progress file") as run:
        return admin.publish_lines(
            queue, path, raw=raw, on_error=on_error, on_step=lambda at: run.step(at - run.sum, at), **options
        )


def _body(given: str | None) -> bytes:
    if given is None:
        raise ConfigurationError("say the BODY, `-` to read it from stdin, or --jsonl FILE")
    if given != "-":
        return given.encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(LARGEST_BODY + 1)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise ConfigurationError(f"--at is written {EXAMPLE}, with its offset from UTC, not {text[:40]!r}")
    return moment


def _on_error(text: str) -> "OnError":
    match text:
        case "stop" | "skip":
            return text
    raise ConfigurationError(f"--on-error must be stop or skip, not {text[:40]!r}")
