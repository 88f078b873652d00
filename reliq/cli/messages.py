"""Commands on messages: `list`, `show`, `cancel`, `purge`, `move` and `publish`."""

import sys
import time
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

import reliq.admin
from reliq.admin.calls import CANCELLABLE, MOVABLE, PLACES, PURGEABLE, check_place
from reliq.admin.filters import duration, headers_of
from reliq.admin.screens import as_value, pretty, start_of
from reliq.cli.keys import describe_wait
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
from reliq.cli.queues import describe_end, format_time
from reliq.errors import ConfigurationError
from reliq.settings import LARGEST_BODY, check_int
from reliq.text import clamp_time, format_duration, shell_command
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from reliq.admin import Admin, Entry, Filter, MessageView
    from reliq.admin.publish import OnError
    from reliq.message import Priority, PublishOptions


#: Characters of a body in a table.
TABLE_BODY = 60
#: Characters of a body in JSON; `reliq show` has all of it.
JSON_BODY = 1000
#: Characters of an error in a table.
TABLE_ERROR = 60
MESSAGE_COLUMNS = ("id", "", "when", "attempt", "left", "size", "key", "body", "error")
#: One list has at most this many messages.
LIST_LIMIT = 10_000
#: Exit code of `publish` when nothing was published.
EXIT_NOT_PUBLISHED = 3
#: An example of --at.
AT_EXAMPLE = "2026-11-21T03:00+01:00"


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
    check_int("limit", limit, least=1, most=LIST_LIMIT)
    check_int("offset", offset, most=10**9)
    total = admin.size(queue, state, key=where.key) if where.is_set else None
    with progress_bar("looking", total, reliq.admin.Tally("found"), lambda _found: "nothing was changed") as run:
        entries = list(islice(admin.messages(queue, state, where, on_step=run.step), offset, offset + limit))
    if json:
        names = (
            "id",
            "state",
            "mark",
            "when",
            "attempt",
            "retries_left",
            "reason",
            "error",
            "key",
            "headers",
            "size",
            "letter",
        )
        print_json(
            [
                {name: getattr(entry, name) for name in names} | {"body": start_of(entry.body, JSON_BODY)}
                for entry in entries
            ]
        )
    elif not entries:
        say(f"no {'more ' * bool(offset)}{state} messages in {queue}{' that match' * where.is_set}")
    else:
        columns = [name for name in MESSAGE_COLUMNS if name != "key" or any(entry.key for entry in entries)]
        print_table(columns, [_row(entry, columns) for entry in entries], long=("body", "error"))


def _row(entry: "Entry", columns: list[str]) -> list[Any]:
    size = "gone" if entry.size is None else entry.size
    error = entry.summary[:TABLE_ERROR]
    body = start_of(entry.body, TABLE_BODY)
    when = format_when(entry.when)
    row = (entry.id, entry.mark, when, entry.attempt, entry.retries_left, size, entry.key, body, error)
    return [cell for column, cell in zip(MESSAGE_COLUMNS, row, strict=True) if column in columns]


def format_when(when: float | None) -> str:
    """Return a time relative to now: `in 5m` or `3s ago`."""
    if when is None:
        return ""
    away = when - time.time()
    return f"in {format_duration(away)}" if away > 0 else f"{format_duration(-away)} ago"


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
    view = admin.show(queue, id)
    if raw:
        if view.size is None:
            raise ConfigurationError(f"message {id[:128]!r} of queue {queue!r} has no body any more; leave --raw out")
        sys.stdout.buffer.write(view.body)
        sys.stdout.flush()
    elif json:
        # Bodies are JSON where they are JSON, else text, else base 64.
        fields = {name: getattr(view, name) for name in view.__dataclass_fields__}
        fields["body"] = None if view.size is None else as_value(view.body)
        fields["letters"] = [
            {**msgspec.to_builtins(letter), "payload": as_value(letter.payload)} for letter in view.letters
        ]
        print_json(fields)
    else:
        print_facts(_describe_message(view))
        if view.size is not None:
            say(*pretty(view.body))


def _describe_message(view: "MessageView") -> list[tuple[str, Any]]:
    """Return the names and values to show, each for one line."""
    remarks: list[str] = [view.mark] if view.mark else []
    remarks += ["suspect"] if view.suspect and view.mark != "suspect" else []
    if view.size is None and view.state != "ended" and view.mark != "cancelled":
        remarks.append("its body is gone, so it will expire")
    state = f"{view.state} ({', '.join(remarks)})" if remarks else str(view.state)
    if view.state == "ended" and not view.ends:
        state = "ended: acked messages are not kept (set history= to keep them)"
    facts: list[tuple[str, Any]] = [("id", view.id), ("state", state)]
    facts += [("published", format_time(view.published) + " UTC")] if view.published is not None else []
    if view.when is not None and view.state not in ("dead", "ended"):
        is_leased = view.state == "unack" and view.mark not in ("nacked", "suspect")
        until = f"until {format_time(view.when)} UTC, unless it is renewed"
        facts.append(("lease", until) if is_leased else ("due", f"{format_time(view.when)} UTC"))
    facts += [("key", view.key)] if view.key else []
    facts += [("priority", view.priority)] if view.priority != "normal" else []
    if view.state == "waiting":
        facts += [("in its line", f"{view.ahead:,} come before it")] if view.ahead is not None else []
        facts += [("it waits", describe_wait(view.line))] if view.line is not None else []
    if view.holder is not None:
        place = f"{view.holder.host} pid {view.holder.pid} (worker {view.holder.worker})"
        facts.append(("runs", f"for {format_duration(view.holder.seconds)} in {place}"))
    if view.attempt is not None:
        facts.append(("deliveries", f"{view.attempt} (snoozed and released ones are not counted)"))
    facts += [("retries left", view.retries_left)] if view.retries_left is not None else []
    facts += [("expires", f"in {format_duration(view.ttl_left)}")] if view.ttl_left is not None else []
    if view.reason:
        facts.append(("last error", view.summary))
    facts += [("failed", _describe_failure(note)) for note in reversed(view.failures)]
    facts += [("header", f"{name}: {value}") for name, value in view.headers.items()]
    if view.taken_seconds is not None:
        facts.append(("id taken", f"for {format_duration(view.taken_seconds)} more"))
    facts += [
        ("ended", f"{end.kind} {format_time(end.at or 0)} UTC  {describe_end(end)}".rstrip()) for end in view.ends
    ]
    facts += [("dead letter", f"{letter.letter}, died {format_time(letter.died)} UTC") for letter in view.letters]
    if not view.searched_all:
        facts.append(("note", "there are too many dead letters to look through; an older one of it may be among them"))
    return facts


def _describe_failure(note: FailureNote) -> str:
    """Return one failure in a line: when, which delivery, where, and why."""
    parts = [] if note.at_ms is None else [f"{format_time(clamp_time(note.at_ms / 1000))} UTC "]
    parts += [] if note.attempt is None else [f"attempt {note.attempt}"]
    parts += [] if note.took_ms is None else [f"after {format_duration(note.took_ms / 1000)}"]
    parts += [f"in {note.by}"] if note.by else []
    return " ".join([*parts, note.summary])


def cancel(
    queue: QueueName,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Messages.")] = None,
    *,
    state: Annotated[
        str, typer.Option(help="Instead of ids: " + " | ".join(CANCELLABLE), autocompletion=state_option(CANCELLABLE))
    ] = "",
    where: Which,
    tombstone: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Refuse a publish of these ids for this time.", show_default=False),
    ] = None,
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
        total = admin.size(queue, check_place(state, CANCELLABLE), key=where.key)
        if dry_run:
            _print_dry_run(admin, queue, state, where, total, "cancelled", json=json)
            return
        confirm(f"Cancel the {state} messages of {queue}, {_describe_choice(where, total)}?", yes=yes)
        with progress_bar("cancelling", total, reliq.admin.Tally("cancelled")) as run:
            done = admin.cancel_where(queue, state, where, tombstone=tombstone, on_step=run.step)
        print_json(done) if json else say(done)
        return
    if where.is_set or dry_run:
        raise ConfigurationError("--header, --match, --key and --dry-run go with --state, not with ids")
    statuses = admin.cancel(queue, ids or [], tombstone=tombstone)
    if json:
        print_json(statuses)
    else:
        say(*(f"{status} {id}" for id, status in statuses.items()))
    if "not_found" in statuses.values():
        raise typer.Exit(EXIT_UNKNOWN_ID)


def purge(
    queue: QueueName,
    *,
    state: Annotated[str, typer.Option(help=" | ".join(PURGEABLE), autocompletion=state_option(PURGEABLE))] = "",
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
        _print_dry_run(admin, queue, state, where, total, "deleted", json=json)
        return
    confirm(f"Delete the {state} messages of {queue}, {_describe_choice(where, total)}?", yes=yes)
    with progress_bar("deleting", total, reliq.admin.Tally("deleted")) as run:
        done = admin.purge(queue, state, where, on_step=run.step)
    print_json(done) if json else say(done)


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

    Cut off at any point, even by a kill, nothing is lost: make the same move again within a minute to finish it. Later,
    messages of its last step, at most 250, may run in both queues. Dead letters go by `reliq dead redrive --to`. Exit codes: 0 done, 1 Redis did not answer or you did not
    agree, 2 an unknown queue or state, 130 interrupted.
    """
    if state == "dead":
        raise ConfigurationError(
            f"dead letters go by `{shell_command('dead redrive', queue, options=['--to', other], layout=admin.redis_keys(queue).layout)}`"
        )
    total = admin.size(queue, check_place(state, MOVABLE), key=where.key)
    if dry_run:
        _print_dry_run(admin, queue, state, where, total, "moved", limit=limit, json=json)
        return
    confirm(f"Move the {state} messages of {queue} to {other}, {_describe_choice(where, total)}?", yes=yes)
    with progress_bar("moving", total, reliq.admin.Tally("moved")) as run:
        done = admin.move(queue, other, state, where, limit=limit, on_step=run.step)
    print_json(done) if json else say(done)


def _describe_choice(where: "Filter", total: int) -> str:
    return "those that match" if where.is_set else f"all {total}"


def _print_dry_run(
    admin: "Admin",
    queue: str,
    state: str,
    where: "Filter",
    total: int,
    done: str,
    *,
    limit: int | None = None,
    json: bool,
) -> None:
    """Count the messages that would be cancelled, deleted or moved, as `done` says, and print how many there are."""
    with progress_bar("looking", total, reliq.admin.Tally("found"), lambda _found: f"nothing was {done}") as run:
        count = admin.count(queue, state, where, on_step=run.step)
    print_found(count if limit is None else min(count, limit), done, json=json)


def publish(
    queue: QueueName,
    body: Annotated[str | None, typer.Argument(help="JSON, sent as it is written; `-` reads it from stdin.")] = None,
    *,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Publish each line of a file as a body.")] = None,
    on_error: Annotated[str, typer.Option(help="At a malformed line: stop, publish nothing; or skip it.")] = "stop",
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes as they are, JSON or not.")] = False,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    at: Annotated[str | None, typer.Option(metavar="WHEN", help=f"Due then, such as {AT_EXAMPLE}.")] = None,
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
    delay_seconds = duration(delay)
    due = None
    if at is not None:
        with suppress(ValueError):
            due = datetime.fromisoformat(at)
        if due is None or due.utcoffset() is None:
            raise ConfigurationError(f"--at is written {AT_EXAMPLE}, with its offset from UTC, not {at[:40]!r}")
    options: PublishOptions = {
        "delay": delay_seconds,
        "at": due,
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
    if on_error not in ("stop", "skip"):
        raise ConfigurationError(f"--on-error must be stop or skip, not {on_error[:40]!r}")
    total = jsonl.stat().st_size if jsonl.is_file() else None
    with progress_bar("bytes", total, 0, lambda _at: "what is confirmed is in the progress file") as run:
        done = admin.publish_lines(
            queue,
            jsonl,
            raw=raw,
            on_error=cast("OnError", on_error),
            on_step=lambda at: run.step(at - run.sum, at),
            **options,
        )
    print_json(done) if json else say(done)
    if done.skipped:
        numbers = ", ".join(map(str, done.malformed)) + (", …" if done.skipped > len(done.malformed) else "")
        complain(f"{done.skipped} malformed lines were skipped: {numbers}")
    if done.cancelled and not done.published + done.before:
        raise typer.Exit(EXIT_NOT_PUBLISHED)


def _body(text: str | None) -> bytes:
    if text is None:
        raise ConfigurationError("say the BODY, `-` to read it from stdin, or --jsonl FILE")
    if text != "-":
        return text.encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(LARGEST_BODY + 1)
