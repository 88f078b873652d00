"""Commands on messages: `list`, `show`, `cancel`, `purge`, `move`, `redrive` and `publish`."""

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

from reliq.admin.filters import END_KINDS, Filter, headers_of
from reliq.admin.screens import as_value, format_missing, pretty, start_of
from reliq.admin.words import CANCELLABLE, MOVABLE, PLACES, PURGEABLE, check_place
from reliq.cli.frame import Answer, Bulk, Table, bulk_command, command
from reliq.cli.options import (
    AdminOption,
    Delay,
    Headers,
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
from reliq.settings import LARGEST_BODY, Limits, check_int, check_is_one_of
from reliq.text import clamp_time, format_duration, join_first, pluralize, shell_command
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from reliq.admin import Admin, Entry, MessageView
    from reliq.admin.publish import OnError
    from reliq.message import Priority, PublishOptions

#: Characters of a body or an error in a table.
TABLE_TEXT = 60
#: Characters of a body in JSON; `reliq show` prints all of it.
JSON_BODY = 1000
#: A list has at most this many messages.
LIST_LIMIT = 10_000
#: Dead letters are grouped for this many seconds.
GROUP_SECONDS = 5.0
#: An example of --at.
AT_EXAMPLE = "2026-11-21T03:00+01:00"


@command
def list_messages(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[str, choice(PLACES)] = "",
    kind: Annotated[str, choice(END_KINDS, "Only messages that ended in this way: ")] = "",
    group: Annotated[bool, typer.Option("--group", help="Count dead letters by cause, most frequent first.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many messages or groups.")] = 20,
    offset: Annotated[int, typer.Option(help="Skip this many messages first.")] = 0,
    *,
    admin: AdminOption,
) -> Answer:
    """
    List the messages of one state, the next to come first; of dead letters and ended messages the newest.

    Example: reliq list orders --state dead --error 'card declined' --newer-than 2h

    The default state is ready; with --key it is waiting. `when` is the due time; in unack the end of the lease or the
    redelivery; in dead and ended the end. Redis keeps the last 1,000 ended messages, and acked messages as
    `Queue(keep_completed=...)` sets. --group reads dead letters for at most 5 s. Exit codes: 0 done, 1 Redis did not answer, 2 an
    unknown queue or state, or a filter that the state does not have.
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
                f"only dead letters are grouped, not {state} messages: leave --state or --group out"
            )
        found = admin.dead_groups(queue, where, for_seconds=GROUP_SECONDS, without=away)
        groups = found.groups[:limit]
        rows = [(one.count, one.reason, one.raised, format_when(one.newest), one.example) for one in groups]
        lines: list[object] = [Table(("count", "reason", "raised", "newest", "example"), rows) if rows else nothing]
        if found.looked < found.of:
            lines.append(f"these are of the newest {pluralize(found.looked, 'letter')} looked at, of {found.of:,}")
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
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    raw: Annotated[bool, typer.Option("--raw", help="Write only the body's bytes to standard output.")] = False,
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the state, body, errors and worker of a message; or how it ended.

    --json has the bodies and headers of its dead letters too, for an id that was published again. Exit codes: 0 done, 1
    Redis is away or refuses, 2 wrong usage, an unknown queue or id, or --raw of a message whose body is gone.

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
        raise ConfigurationError(f"message {id[:128]!r} of queue {queue!r} has no body any more; leave --raw out")
    sys.stdout.buffer.write(body)
    sys.stdout.flush()
    return Answer(value, ())


def _describe_message(view: "MessageView") -> list[str]:
    """Return a line for each fact of a message."""
    remarks = [view.mark, "suspect" if view.suspect and view.mark != "suspect" else ""]
    if view.size is None and view.state != "ended" and view.mark != "cancelled":
        remarks.append("its body is gone, so it will expire")
    state = f"{view.state} ({', '.join(filter(None, remarks))})" if any(remarks) else str(view.state)
    if view.state == "ended" and not view.ends:
        state = "ended: acked messages are not kept (set keep_completed= to keep them)"
    is_leased = view.state == "unack" and view.mark not in ("nacked", "suspect")
    until = "" if view.state in ("dead", "ended") else format_time(view.when)
    holder, letters = view.holder, view.letters
    return facts(
        [
            ("id", view.id),
            ("state", state),
            ("published", format_time(view.published)),
            ("lease" if is_leased else "due", f"until {until}, unless it is renewed" if is_leased and until else until),
            ("key", view.key),
            ("priority", view.priority if view.priority != "normal" else None),
            ("in its line", None if view.ahead is None else f"{view.ahead:,} come before it"),
            ("it waits", view.line and describe_wait(view.line)),
            (
                "runs",
                holder
                and f"for {format_duration(holder.seconds)} in {holder.host} pid {holder.pid} (worker {holder.worker})",
            ),
            (
                "deliveries",
                None if view.attempt is None else f"{view.attempt} (without snoozed and released deliveries)",
            ),
            ("retries left", view.retries_left),
            ("expires", None if view.ttl_left is None else f"in {format_duration(view.ttl_left)}"),
            ("last error", view.reason and view.summary),
            *(("failed", _describe_failure(note)) for note in reversed(view.failures)),
            *(("header", f"{name}: {value}") for name, value in view.headers.items()),
            ("id taken", None if view.taken_seconds is None else f"for {format_duration(view.taken_seconds)} more"),
            *(("ended", f"{end.kind} {format_time(end.at or 0)}  {describe_end(end)}".rstrip()) for end in view.ends),
            *(("dead letter", f"{letter.letter}, died {format_time(letter.died)}") for letter in letters),
            (
                "note",
                "" if view.searched_all else "too many dead letters to search; an older letter of it may be among them",
            ),
        ]
    )


def _describe_failure(note: FailureNote) -> str:
    """Return the time, the delivery, the worker and the error of a failure."""
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
    state: Annotated[str, choice(CANCELLABLE, "Instead of ids: ")] = "",
    *,
    where: Which,
    tombstone: Annotated[float | None, time_span("Refuse a publish of these ids for this time.")] = None,
    admin: AdminOption,
) -> Bulk:
    """
    Cancel messages: they do not start; a running message is not retried, and its handler gets the cancellation.

    The id of a `cancelled` message is free immediately; the id of a `running` message stays taken until its end and its `dedup`.

    Example: reliq cancel orders order-42 order-43

    Instead of ids: reliq cancel orders --state pending --match '"tenant":"acme"' --dry-run. Exit codes: 0 cancelled
    or running, 1 Redis did not answer or you did not agree, 2 an unknown queue or id, 130 interrupted.
    """
    if bool(ids) == bool(state):
        raise ConfigurationError("say which messages: ids, or --state with --header, --match or --key")
    if state:
        check_place(state, CANCELLABLE)
        return _bulk(
            admin, queue, state, where, partial(admin.cancel_where, tombstone=tombstone), "Cancel", "cancelled"
        )
    if where.is_set:
        raise ConfigurationError("--header, --match, --key and --dry-run go with --state, not with ids")

    def each_id(on_step: object) -> Answer:  # noqa: ARG001  it is one request
        statuses = admin.cancel(queue, ids or [], tombstone=tombstone)
        lines = [f"{status} {id}" for id, status in statuses.items()]
        return Answer(statuses, lines, EXIT_USAGE if "not_found" in statuses.values() else 0)

    return Bulk(each_id, "cancelled")


@bulk_command
def purge(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[str, choice(PURGEABLE)] = "",
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Delete the messages of one state, or dead letters, for good; try --dry-run first.

    Example: reliq purge orders --state dead --older-than 3d --dry-run

    --key without --state deletes the messages that wait for a turn of the key: reliq purge mail --key tenant-7. A message
    in the middle of a list is cancelled: Redis deletes its body immediately, and its id when a worker claims it. Exit
    codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue, state or id, 130 interrupted.
    """
    state = state or ("waiting" if where.key else "")
    if not state:
        raise ConfigurationError("say which messages: --state, or --key for those that wait in the line of a key")
    check_place(state, PURGEABLE)
    return _bulk(admin, queue, state, where, admin.purge, "Delete", "deleted")


@bulk_command
def move(
    queue: QueueName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The target queue.", autocompletion=queue_names)],
    *,
    state: Annotated[str, choice(MOVABLE)],
    where: Which,
    limit: Limit = None,
    admin: AdminOption,
) -> Bulk:
    """
    Move messages of one state to another queue, with ids, due times, retries left and headers.

    Example: reliq move orders orders-slow --state ready --header tenant=acme --dry-run

    Cut off at any point, even by a kill, nothing is lost: make the same move again within a minute to finish it. Later,
    messages of its last step, at most 250, may run in both queues. Dead letters go by `reliq redrive --to`. Exit codes: 0
    done, 1 Redis did not answer or you did not agree, 2 an unknown queue or state, 130 interrupted.
    """
    if state == "dead":
        redrive = shell_command("redrive", queue, options=["--to", other], layout=admin.redis_keys(queue).layout)
        raise ConfigurationError(f"dead letters go by `{redrive}`")
    check_place(state, MOVABLE)

    def to_other(queue: str, state: str, where: Filter, **options: Any) -> object:
        return admin.move(queue, other, state, where, limit=limit, **options)

    return _bulk(admin, queue, state, where, to_other, "Move", "moved", limit)


@bulk_command
def redrive(
    queue: QueueName,
    where: WhichOfAny,
    every: Annotated[bool, typer.Option("--all", help="All dead letters; asks before it acts.")] = False,
    rate: Annotated[int | None, parsed(Limits.parse_rate, "No faster than this: 50/s, 100/m.", metavar="N/s")] = None,
    limit: Limit = None,
    to: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="The target queue.", autocompletion=queue_names)
    ] = None,
    retries: Retries = None,
    delay: Delay = None,
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Publish dead letters again, oldest first, with fresh retries.

    Example: reliq redrive orders --error 'card declined' --rate 50/s

    Ctrl-C stops it and prints how many were redriven; run again, it goes on. Exit codes: 0 done, 1 Redis did not answer or
    you did not agree, 2 an unknown queue, id or filter, 130 interrupted.
    """
    if where.is_set == every:
        raise ConfigurationError(
            "say which dead letters: ids, --reason, --exception, --error, an age, --header, --match, --key; or --all"
        )

    def again(queue: str, _state: str, where: Filter, **options: Any) -> object:
        pace = None if rate is None else 1e6 / rate
        return admin.redrive(queue, where, to=to, limit=limit, rate=pace, retries=retries, delay=delay or 0, **options)

    return _bulk(admin, queue, "dead", where, again, "Redrive" if every else "", "redriven", limit)


def _bulk(
    admin: "Admin",
    queue: str,
    state: str,
    where: Filter,
    act: Callable[..., object],
    verb: str,
    done: str,
    limit: int | None = None,
) -> Bulk:
    """Return work on the messages of a state that the filter chooses; without a verb it does not ask first."""
    where.check(state)
    total = admin.count(queue, state, Filter(key=where.key))
    kind = "dead letters" if state == "dead" else f"{state} messages"
    asks = f"{verb} the {kind} of {queue}, {'those that match' if where.is_set else f'all {total}'}?" if verb else ""
    ids = where.ids if state == "dead" else frozenset()
    missing = sorted(ids - {entry.id for entry in admin.messages(queue, "dead", Filter(ids=ids))}) if ids else []
    see = shell_command("list", queue, options=["--state", "dead"], layout=admin.redis_keys(queue).layout)
    complaints = [f"queue {queue!r} has no dead letter of {join_first(missing)}; see `{see}`"] if missing else []
    count = partial(admin.count, queue, state, where)
    return Bulk(partial(act, queue, state, where), done, count, total, asks, limit, complaints)


def _time_of(text: str) -> datetime:
    """Return a point in time; raise ConfigurationError for a text without an offset from UTC."""
    with suppress(ValueError):
        at = datetime.fromisoformat(text)
        if at.utcoffset() is not None:
            return at
    raise ConfigurationError(f"a time is written {AT_EXAMPLE}, with its offset from UTC, not {text[:40]!r}")


@command
def publish(
    queue: QueueName,
    body: Annotated[str | None, typer.Argument(help="JSON, sent as it is written; `-` reads it from stdin.")] = None,
    *,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Publish each line of a file as a body.")] = None,
    on_error: Annotated[
        str, choice(("stop", "skip"), "At a malformed line, publish nothing or the other lines: ")
    ] = "stop",
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes as they are, JSON or not.")] = False,
    delay: Delay = None,
    at: Annotated[datetime | None, parsed(_time_of, f"Due then, for example {AT_EXAMPLE}.", metavar="WHEN")] = None,
    retries: Retries = None,
    ttl: Annotated[float | None, time_span("How late it may start, instead of 7d.")] = None,
    id: Annotated[str | None, typer.Option(help="Your own id: Redis refuses it while it is known.")] = None,
    dedup: Annotated[float | None, time_span("How long Redis refuses the id after its end.")] = None,
    header: Headers = None,
    key: Annotated[str | None, typer.Option(help="The message key: limits and order hold for each key.")] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low; without --key.")] = "normal",
    admin: WholeQueueAdmin,
) -> Answer | Bulk:
    """
    Publish a message, or each line of a file, and print the status.

    Example: reliq publish reports '{}' --id report-2026-11-21 --dedup 86400

    With --jsonl, run the same command again after an interruption: no line is published twice, until --dedup (1d) after
    its message ended. A changed file counts as a new file: all its lines are published.

    Exit codes: 0 published, or all lines are; 1 Redis did not answer or refused; 2 a wrong option, an unreadable file, a
    body or line that is not JSON; 3 nothing was published, because the id is taken or tombstoned.
    """
    if dedup is not None and id is None and jsonl is None:
        raise ConfigurationError("--dedup needs an id of yours, for example --id report-7")
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
    }
    if jsonl is None:
        if body is None:
            raise ConfigurationError("say the BODY, `-` to read it from stdin, or --jsonl FILE")
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
