"""Commands on messages: `list`, `show`, `cancel`, `purge`, `move`, `redrive` and `publish`."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from reliq.admin.filters import CANCELLABLE, END_KINDS, PLACES, PURGEABLE, Filter, check_place, headers_of
from reliq.admin.screens import as_value, format_missing, pretty, start_of
from reliq.cli.frame import Answer, Bulk, Table, bulk_command, command
from reliq.cli.options import (
    AdminOption,
    Delay,
    Ids,
    Limit,
    QueueName,
    Retries,
    Which,
    WhichOfAny,
    WholeQueueAdmin,
    choice,
    parsed,
    queue_names,
    time_span,
)
from reliq.cli.output import EXIT_UNFINISHED, EXIT_USAGE, facts, format_time, format_when, show_progress
from reliq.cli.queues import describe_end, describe_wait
from reliq.errors import ConfigurationError
from reliq.message import TASK_HEADER, Priority, PublishOptions
from reliq.settings import LARGEST_BODY, Limits, check_int, check_is_one_of
from reliq.text import clamp_time, format_duration, join_first, pluralize, shell_command
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from reliq.admin import Admin, Entry, MessageView
    from reliq.admin.bulk import OnError

#: A table shows at most this many characters of a body or an error.
TABLE_TEXT = 60
#: `reliq list --json` prints at most this many characters of a body. `reliq show` prints the whole body.
JSON_BODY = 1000
#: The maximum value of the option --limit of `reliq list`.
LIST_LIMIT = 10_000
#: `reliq list --group` reads dead letters for at most this many seconds.
GROUP_SECONDS = 5.0
#: The example of a time in the help text and the error messages of the option --at.
AT_EXAMPLE = "2026-11-21T03:00+01:00"


@command
def list_messages(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[str, choice(PLACES, "List messages of this state: ")] = "",
    kind: Annotated[str, choice(END_KINDS, "Only messages that ended in this way: ")] = "",
    group: Annotated[bool, typer.Option("--group", help="Count dead letters by error, most frequent first.")] = False,
    limit: Annotated[int, typer.Option(help="Show at most this many messages or groups.")] = 20,
    offset: Annotated[int, typer.Option(help="Skip this many messages at the start of the list.")] = 0,
    *,
    admin: AdminOption,
) -> Answer:
    """
    List messages of one state in order of delivery; dead letters and ended messages newest first.

    Example: reliq list orders --state dead --error 'card declined' --newer-than 2h

    Without --state, the command lists ready messages; with --kind ended messages, with --group dead letters, and with
    --key messages that wait under the key. The column `when` is the due time; for unack, the end of the lease or backoff;
    for dead and ended messages, the time of their end. Redis keeps the last 1,000 messages that ended without an ack.
    --kind acked lists acked messages; `Queue(keep_completed=...)` sets how many are kept. --group reads dead letters for
    at most 5 s. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or state, or a filter that the state does
    not have.
    """
    state = state or ("ended" if kind else "dead" if group else "waiting" if where.key else "ready")
    where = replace(where, kind=cast("Any", kind))
    check_int("limit", limit, least=1, most=LIST_LIMIT)
    check_int("offset", offset, most=10**9)
    away = admin.shards(queue).away if state == "dead" else ()
    partial_list = [f"The list is {format_missing(away)}."] if away else []
    nothing = f"no {'more ' * bool(offset)}{state} messages in {queue}{' that match' * where.is_set}"
    if state == "ended" and kind == "acked":
        nothing += " (Queue(keep_completed=...) keeps acked messages)"
    if group:
        if state != "dead":
            raise ConfigurationError(
                f"--group works only for dead letters, not for {state} messages: leave --state or --group out"
            )
        found = admin.dead_groups(queue, where, for_seconds=GROUP_SECONDS, without=away)
        groups = found.groups[:limit]
        rows = [(one.count, one.reason, one.raised, format_when(one.newest), one.example) for one in groups]
        lines: list[object] = [Table(("count", "reason", "raised", "newest", "example"), rows) if rows else nothing]
        if found.looked < found.of:
            lines.append(f"only the newest {pluralize(found.looked, 'letter')} of {found.of:,} were read")
        return Answer({"groups": groups, "looked": found.looked, "of": found.of}, lines, complaints=partial_list)
    total = admin.count(queue, state, Filter(key=where.key)) if where.is_set else None
    with show_progress(total, "changed") as step:
        seen = admin.messages(queue, state, where, without=away, on_step=lambda looked, _found: step(looked))
        entries = list(islice(seen, offset, offset + limit))
    value = [asdict(entry) | {"body": start_of(entry.body, JSON_BODY)} for entry in entries]
    columns = ("id", "", "when", "attempt", "left", "size", "key", "body", "error")
    table = Table(columns, map(_row, entries), ("body", "error"))
    return Answer(value, [table if entries else nothing], complaints=partial_list)


def _row(entry: "Entry") -> tuple[Any, ...]:
    size = "" if entry.state == "ended" else "gone" if entry.size is None else entry.size
    error = entry.error if entry.error.startswith(entry.reason) else f"{entry.reason}: {entry.error}".removesuffix(": ")
    if entry.took is not None:
        error = f"after {format_duration(entry.took)}"
    mark, when, body = entry.mark, format_when(entry.when), start_of(entry.body, TABLE_TEXT)
    return entry.id, mark, when, entry.attempt, entry.retries_left, size, entry.key, body, error[:TABLE_TEXT]


@command
def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message, for example order-42.")],
    raw: Annotated[bool, typer.Option("--raw", help="Write only the bytes of the body to standard output.")] = False,
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the state, body, errors and worker of a message, or how it ended.

    --json also prints the bodies and headers of all dead letters with this id; an id that was published again can have
    several. Exit codes: 0 done, 1 Redis is unavailable or refuses, 2 wrong usage, an unknown queue or id, or --raw for a
    message whose body was deleted.

    Example: reliq show orders order-42
    """
    view = admin.show(queue, id)
    letters = [
        asdict(letter) | {"payload": as_value(letter.payload), "headers": letter.header.headers}
        for letter in view.letters
    ]
    body = None if view.size is None else view.body
    value = asdict(view) | {"body": None if body is None else as_value(body), "letters": letters}
    if not raw:
        return Answer(value, [*_describe_message(view), *(pretty(body) if body is not None else ())])
    if body is None:
        raise ConfigurationError(f"the body of message {id[:128]!r} of queue {queue!r} was deleted; leave --raw out")
    sys.stdout.buffer.write(body)
    sys.stdout.flush()
    return Answer(value, ())


def _describe_message(view: "MessageView") -> list[str]:
    """Return the lines that `reliq show` prints above the body of a message."""
    remarks = [view.mark, "suspect" if view.suspect and view.mark != "suspect" else ""]
    if view.size is None and view.state != "ended" and view.mark != "cancelled":
        remarks.append("its body is gone, so it will expire")
    state = f"{view.state} ({', '.join(filter(None, remarks))})" if any(remarks) else str(view.state)
    if view.state == "ended" and not view.ends:
        state = "ended: acked messages are not kept (set keep_completed= to keep them)"
    is_leased = view.state == "unack" and view.mark not in ("nacked", "suspect")
    until = "" if view.state in ("dead", "ended") else format_time(view.when)
    holder, letters = view.holder, view.letters
    runs = (
        holder and f"for {format_duration(holder.seconds)} in {holder.host} pid {holder.pid} (worker {holder.worker})"
    )
    deliveries = None if view.attempt is None else f"{view.attempt} (without snoozed and released deliveries)"
    note = "" if view.searched_all else "too many dead letters to search; older letters of this message may exist"
    return facts(
        [
            ("id", view.id),
            ("state", state),
            ("published", format_time(view.published)),
            ("lease" if is_leased else "due", f"until {until}, unless it is renewed" if is_leased and until else until),
            ("key", view.key),
            ("priority", view.priority if view.priority != "normal" else None),
            ("cost", view.cost if view.cost != 1 else None),
            ("in its line", None if view.ahead is None else f"{view.ahead:,} come before it"),
            ("it waits", view.line and describe_wait(view.line)),
            ("runs", runs),
            ("deliveries", deliveries),
            ("retries left", view.retries_left),
            ("expires", None if view.ttl_left is None else f"in {format_duration(view.ttl_left)}"),
            ("last error", view.reason and view.summary),
            *(("failed", _describe_failure(failure)) for failure in reversed(view.failures)),
            ("task", view.headers.get(TASK_HEADER)),
            *(("header", f"{name}: {value}") for name, value in view.headers.items() if name != TASK_HEADER),
            ("progress", None if view.progress is None else f"{view.progress:.1%} {view.note}".rstrip()),
            ("checkpoint", None if view.cursor is None else json.dumps(view.cursor, ensure_ascii=False)),
            ("id taken", None if view.taken_seconds is None else f"for {format_duration(view.taken_seconds)} more"),
            *(("ended", f"{end.kind} {format_time(end.at or 0)}  {describe_end(end)}".rstrip()) for end in view.ends),
            *(("dead letter", f"{letter.letter}, died {format_time(letter.died)}") for letter in letters),
            ("note", note),
        ]
    )


def _describe_failure(note: FailureNote) -> str:
    """Return a line about a failed attempt: its time, number, duration, worker and error."""
    parts = [
        "" if note.at_ms is None else f"{format_time(clamp_time(note.at_ms / 1000))} ",
        "" if note.attempt is None else f"attempt {note.attempt}",
        "" if note.took_ms is None else f"after {format_duration(note.took_ms / 1000)}",
        f"in {note.by}" if note.by else "",
        note.summary,
    ]
    return " ".join(filter(None, parts))


@bulk_command
def cancel(
    queue: QueueName,
    ids: Ids = None,
    state: Annotated[str, choice(CANCELLABLE, "Cancel messages of this state, instead of ids: ")] = "",
    *,
    where: Which,
    tombstone: Annotated[
        float | None, time_span("How long Redis refuses new messages with the cancelled ids, for example 1d.")
    ] = None,
    admin: AdminOption,
) -> Bulk:
    """
    Cancel messages: waiting messages never start; running messages are not retried.

    The handler of a running message is notified. The command prints `cancelled` if the message was waiting; you can
    publish its id again immediately. It prints `running` if the message runs; its id stays taken until the message has
    ended and its `dedup` time is over.

    Example: reliq cancel orders order-42 order-43

    Without ids, choose by state: reliq cancel orders --state pending --match '"tenant":"acme"' --dry-run. Exit codes: 0
    every message was waiting or running, 1 Redis did not answer or you did not confirm, 2 an unknown queue or id, 130
    interrupted.
    """
    if bool(ids) == bool(state):
        raise ConfigurationError("name the messages: give ids, or --state with --header, --task, --match or --key")
    if state:
        check_place(state, CANCELLABLE)
        run = partial(admin.cancel_where, queue, state, where, tombstone=tombstone)
        return _bulk(admin, queue, state, where, run, "Cancel", "cancelled")
    if where.is_set:
        raise ConfigurationError("--header, --task, --match, --key and --dry-run need --state instead of ids")

    def each_id(on_step: object) -> Answer:  # noqa: ARG001  it is one request
        statuses = admin.cancel(queue, ids or [], tombstone=tombstone)
        lines = [f"{status} {id}" for id, status in statuses.items()]
        return Answer(statuses, lines, EXIT_USAGE if "not_found" in statuses.values() else 0)

    return Bulk(each_id, "cancelled")


@bulk_command
def purge(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[str, choice(PURGEABLE, "Delete messages of this state: ")] = "",
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Delete messages of one state, or dead letters, permanently; try --dry-run first.

    Example: reliq purge orders --state dead --older-than 3d --dry-run

    --key without --state deletes the messages that wait under a message key: `reliq purge mail --key tenant-7`. If you
    delete only some messages of a state with a filter, their ids may remain in Redis until a worker reaches them; their
    bodies are deleted immediately. Exit codes: 0 done, 1 Redis did not answer or you did not confirm, 2 an unknown queue,
    state or id, 130 interrupted.
    """
    state = state or ("waiting" if where.key else "")
    if not state:
        raise ConfigurationError("name the messages: give --state, or --key for messages that wait under a message key")
    check_place(state, PURGEABLE)
    return _bulk(admin, queue, state, where, partial(admin.purge, queue, state, where), "Delete", "deleted")


@bulk_command
def move(
    queue: QueueName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="Queue to move the messages to.", autocompletion=queue_names)
    ],
    *,
    state: Annotated[str, choice(CANCELLABLE, "Move messages of this state: ")],
    where: Which,
    limit: Limit = None,
    admin: AdminOption,
) -> Bulk:
    """
    Move messages of one state to another queue, with their ids, due times, retries left and headers.

    Example: reliq move orders orders-slow --state ready --header tenant=acme --dry-run

    If the command is interrupted, even by a kill, no message is lost: run the same command again within a minute to
    finish the move. If you run it later, up to 250 messages of the interrupted step may run in both queues. To move dead
    letters, use `reliq redrive --to`. Exit codes: 0 done, 1 Redis did not answer or you did not confirm, 2 an unknown
    queue or state, 130 interrupted.
    """
    if state == "dead":
        redrive = shell_command("redrive", queue, options=["--to", other], layout=admin.redis_keys(queue).layout)
        raise ConfigurationError(f"move dead letters with `{redrive}`")
    check_place(state, CANCELLABLE)

    run = partial(admin.move, queue, other, state, where, limit=limit)
    return _bulk(admin, queue, state, where, run, "Move", "moved", limit)


@bulk_command
def redrive(
    queue: QueueName,
    where: WhichOfAny,
    every: Annotated[bool, typer.Option("--all", help="Redrive all dead letters; asks for confirmation.")] = False,
    rate: Annotated[
        int | None, parsed(Limits.parse_rate, "Highest rate of publishing, for example 50/s or 100/m.", metavar="N/s")
    ] = None,
    limit: Limit = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="Queue to publish to; by default the queue that the messages died in.",
            autocompletion=queue_names,
        ),
    ] = None,
    retries: Retries = None,
    delay: Delay = None,
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Publish dead letters again, oldest first; each message gets all its retries again.

    Example: reliq redrive orders --error 'card declined' --rate 50/s

    If you press Ctrl-C, the command prints how many dead letters it has published, and ends; run it again to continue.
    Exit codes: 0 done, 1 Redis did not answer or you did not confirm, 2 an unknown queue, id or filter, 130 interrupted.
    """
    if where.is_set == every:
        raise ConfigurationError(
            "give either --all or a filter: ids, --reason, --exception, --error, an age, --header, --task, --match or --key"
        )

    pace = None if rate is None else 1e6 / rate
    options: dict[str, Any] = {"to": to, "limit": limit, "rate": pace, "retries": retries, "delay": delay or 0}
    run = partial(admin.redrive, queue, where, **options)
    return _bulk(admin, queue, "dead", where, run, "Redrive" if every else "", "redriven", limit)


def _bulk(
    admin: "Admin",
    queue: str,
    state: str,
    where: Filter,
    run: Callable[..., object],
    verb: str,
    done: str,
    limit: int | None = None,
) -> Bulk:
    """
    Return the work of a command that changes the matching messages in a state.

    Args:
        run: a function that does the work. Its argument `on_step` is a function that it calls after each step.
        verb: the first word of the question that the user must confirm, such as `Delete`; empty for no question.
        done: the word for the effect on a message, such as `deleted`.
        limit: the maximum number of messages to change; None for all.
    """
    where.check(state)
    total = admin.count(queue, state, Filter(key=where.key))
    kind = "dead letters" if state == "dead" else f"{state} messages"
    asks = f"{verb} the {kind} of {queue}, {'those that match' if where.is_set else f'all {total}'}?" if verb else ""
    ids = where.ids if state == "dead" else frozenset()
    missing = sorted(ids - {entry.id for entry in admin.messages(queue, "dead", Filter(ids=ids))}) if ids else []
    see = shell_command("list", queue, options=["--state", "dead"], layout=admin.redis_keys(queue).layout)
    complaints = [f"queue {queue!r} has no dead letter of {join_first(missing)}; see `{see}`"] if missing else []
    return Bulk(run, done, partial(admin.count, queue, state, where), total, asks, limit, complaints)


def _time_of(text: str) -> datetime:
    """Convert a time in ISO format to a datetime. Raise ConfigurationError if the time has no offset from UTC."""
    with suppress(ValueError):
        at = datetime.fromisoformat(text)
        if at.utcoffset() is not None:
            return at
    raise ConfigurationError(f"write a time like {AT_EXAMPLE}, with its offset from UTC, not {text[:40]!r}")


@command
def publish(
    queue: QueueName,
    body: Annotated[
        str | None, typer.Argument(help="Body of the message as JSON, sent unchanged; `-` reads it from stdin.")
    ] = None,
    *,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Publish each line of this file as the body of a message.")
    ] = None,
    on_error: Annotated[
        str,
        choice(
            ("stop", "skip"),
            "If a line of --jsonl is malformed, stop publishes nothing, skip publishes the other lines: ",
        ),
    ] = "stop",
    raw: Annotated[
        bool, typer.Option("--raw", help="Publish the bytes of the body even if they are not JSON.")
    ] = False,
    delay: Delay = None,
    at: Annotated[
        datetime | None, parsed(_time_of, f"Due time of the message, for example {AT_EXAMPLE}.", metavar="WHEN")
    ] = None,
    retries: Retries = None,
    ttl: Annotated[
        float | None, time_span("How long after its due time the message may start; the default is 7d.")
    ] = None,
    id: Annotated[
        str | None, typer.Option(help="Your own message id; Redis refuses another message with this id, see --dedup.")
    ] = None,
    dedup: Annotated[
        float | None, time_span("How long after the message has ended Redis still refuses its id.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Header of the message, for example tenant=acme; may be given again."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Message key, for example a tenant; order and limits apply to each key.")
    ] = None,
    priority: Annotated[str, typer.Option(help="Priority of a message without a key: high, normal or low.")] = "normal",
    cost: Annotated[
        int, typer.Option(help="Cost of the message, for example in tokens, if its queue has a rate 'by cost'.")
    ] = 1,
    admin: WholeQueueAdmin,
) -> Answer | Bulk:
    """
    Publish a message, or each line of a file as a message, and print the result.

    Example: reliq publish reports '{}' --id report-2026-11-21 --dedup 86400

    If a publish of a --jsonl file is interrupted, run the same command again within the time of --dedup (default 1d): it
    publishes only the missing lines. If you change the file, all its lines are published again.

    Exit codes: 0 the message or all lines were published; 1 Redis did not answer or refused; 2 a wrong option, an
    unreadable file, or a body or line that is not JSON; 3 nothing was published, because the id is taken or tombstoned.
    """
    if dedup is not None and id is None and jsonl is None:
        raise ConfigurationError("--dedup needs your own message id, for example --id report-7")
    options: PublishOptions = {
        "delay": delay or 0,
        "at": at,
        "retries": retries,
        "ttl": ttl,
        "headers": headers_of(header),
        "dedup": dedup,
        "id": id,
        "key": key,
        "priority": cast("Priority", priority),
        "cost": cost,
    }
    if jsonl is None:
        if body is None:
            raise ConfigurationError("give BODY, `-` to read it from stdin, or --jsonl FILE")
        content = sys.stdin.buffer.read(LARGEST_BODY + 1) if body == "-" else body.encode("utf-8", "surrogateescape")
        receipt = admin.publish(queue, content, raw=raw, **options)
        return Answer(receipt, [f"{receipt.status} {receipt.id}"], 0 if receipt else EXIT_UNFINISHED)
    if body is not None or id is not None:
        raise ConfigurationError("--jsonl takes bodies and ids from the file: leave out BODY and --id")
    check_is_one_of("--on-error", on_error, ("stop", "skip"))

    def lines(**given: Any) -> Answer:
        done = admin.publish_lines(queue, jsonl, raw=raw, on_error=cast("OnError", on_error), **given, **options)
        numbers = join_first([str(number) for number in done.malformed])
        skipped = f"{pluralize(len(done.malformed), 'malformed line was', 'malformed lines were')} skipped: {numbers}"
        nothing = done.cancelled and not done.published + done.before
        return Answer(done, None, EXIT_UNFINISHED if nothing else 0, [skipped] if done.malformed else ())

    return Bulk(lines, "published", total=jsonl.stat().st_size if jsonl.is_file() else None)
