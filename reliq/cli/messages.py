"""Commands on messages: `list`, `show`, `cancel`, `purge`, `move`, `redrive` and `publish`."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from reliq.admin.filters import END_KINDS, Filter, duration, headers_of
from reliq.admin.screens import as_value, format_missing, pretty, start_of
from reliq.admin.words import CANCELLABLE, MOVABLE, PLACES, PURGEABLE, check_place
from reliq.cli.frame import Answer, Bulk, Table, bulk_command, command
from reliq.cli.keys import describe_wait
from reliq.cli.options import AdminOption, Ids, QueueName, Which, WhichOfAny, WholeQueueAdmin, queue_names, words
from reliq.cli.output import EXIT_UNKNOWN_ID, facts, show_progress
from reliq.cli.queues import describe_end, format_time
from reliq.errors import ConfigurationError
from reliq.settings import LARGEST_BODY, check_int, check_is_one_of
from reliq.text import clamp_time, format_duration, pluralize, shell_command
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from reliq.admin import Admin, Entry, MessageView
    from reliq.admin.messages import OnStep
    from reliq.admin.publish import OnError
    from reliq.message import Letter, Priority, PublishOptions

#: Characters of a body or an error in a table.
TABLE_TEXT = 60
#: Characters of a body in JSON; `reliq show` has all of it.
JSON_BODY = 1000
COLUMNS = ("id", "", "when", "attempt", "left", "size", "key", "body", "error")
#: One list has at most this many messages.
LIST_LIMIT = 10_000
#: Dead letters are grouped for this many seconds.
GROUP_SECONDS = 5.0
#: Exit code of `publish` when nothing was published.
EXIT_NOT_PUBLISHED = 3
#: An example of --at.
AT_EXAMPLE = "2026-11-21T03:00+01:00"
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/([smh]))?")
#: At most this many numbers of malformed lines are printed.
_NUMBERS_SHOWN = 20
_PERIODS = {"s": 1, "m": 60, "h": 3600}


@command
def list_messages(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[
        str, typer.Option(help=f"{', '.join(PLACES[:-1])} or {PLACES[-1]}.", autocompletion=words(PLACES))
    ] = "",
    kind: Annotated[
        str,
        typer.Option(
            help=f"Only ended so: {', '.join(END_KINDS)} (where history is kept).", autocompletion=words(END_KINDS)
        ),
    ] = "",
    group: Annotated[
        bool, typer.Option("--group", help="Count dead letters by cause, the most frequent first.")
    ] = False,
    limit: Annotated[int, typer.Option(help="The most to show.")] = 20,
    offset: Annotated[int, typer.Option(help="How many to pass over first.")] = 0,
    *,
    admin: AdminOption,
) -> Answer:
    """
    List the messages of one state, the next to come first; of dead letters and ended messages the newest.

    Example: reliq list orders --state dead --error 'card declined' --newer-than 2h

    Without --state those of ready; with --key those that wait for a turn of the key. `when` is the due time; of unack the
    end of the lease or the redelivery; of dead and ended the end. The last 1,000 ended messages are known, acked ones as
    `Queue(history=...)` says. Groups are made of the dead letters that are read in 5 s. Exit codes: 0 done, 1 Redis did not
    answer, 2 an unknown queue or state, or a filter that the state has not.
    """
    state = state or ("ended" if kind else "dead" if group else "waiting" if where.key else "ready")
    where = replace(where, kind=cast("Any", kind))
    check_int("limit", limit, least=1, most=LIST_LIMIT)
    check_int("offset", offset, most=10**9)
    away = admin.shards(queue).away if state == "dead" else ()
    note = f"The list is {format_missing(away)}." if away else ""
    nothing = f"no {'more ' * bool(offset)}{state} messages in {queue}{' that match' * where.is_set}"
    if state == "ended" and kind == "acked":
        nothing += " (Queue(history=...) keeps acked ones)"
    if group:
        if state != "dead":
            raise ConfigurationError(
                f"only dead letters are grouped, not {state} messages: leave --state or --group out"
            )
        return _groups(admin, queue, where, limit, nothing, away)._replace(note=note)
    total = admin.count(queue, state, Filter(key=where.key)) if where.is_set else None
    with show_progress(total, lambda _found: "nothing was changed") as step:
        entries = list(islice(admin.messages(queue, state, where, without=away, on_step=step), offset, offset + limit))
    value = [_entry_value(entry) for entry in entries]
    names = [name for name in COLUMNS if name != "key" or any(entry.key for entry in entries)]
    table = Table(names, [_row(entry, names) for entry in entries], ("body", "error"))
    return Answer(value, [table if entries else nothing], note=note)


def _groups(admin: "Admin", queue: str, where: "Filter", limit: int, nothing: str, away: Sequence[int]) -> Answer:
    found = admin.dead_groups(queue, where, for_seconds=GROUP_SECONDS, without=away)
    groups = found.groups[:limit]
    rows = [(group.count, group.reason, group.raised, format_when(group.newest), group.example) for group in groups]
    lines: list[object] = [Table(("count", "reason", "raised", "newest", "example"), rows)] if rows else [nothing]
    if found.looked < found.of:
        lines.append(f"these are of the newest {pluralize(found.looked, 'letter')} looked at, of {found.of:,}")
    return Answer({"groups": groups, "looked": found.looked, "of": found.of}, lines)


def _entry_value(entry: "Entry") -> dict[str, Any]:
    """Return a message as JSON has it."""
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__} | {
        "body": start_of(entry.body, JSON_BODY)
    }


def _row(entry: "Entry", columns: list[str]) -> list[Any]:
    size = "" if entry.state == "ended" else "gone" if entry.size is None else entry.size
    error = f"after {format_duration(entry.took)}" if entry.took is not None else _describe_error(entry)[:TABLE_TEXT]
    body = start_of(entry.body, TABLE_TEXT)
    when = format_when(entry.when)
    row = (entry.id, entry.mark, when, entry.attempt, entry.retries_left, size, entry.key, body, error)
    return [cell for column, cell in zip(COLUMNS, row, strict=True) if column in columns]


def _describe_error(entry: "Entry") -> str:
    """Return the reason of the last failure, and its error."""
    is_told = not entry.error or entry.error.startswith(entry.reason)
    return entry.error or entry.reason if is_told else f"{entry.reason}: {entry.error}"


def format_when(when: float | None) -> str:
    """Return a time relative to now: `in 5m` or `3s ago`."""
    if when is None:
        return ""
    away = when - time.time()
    return f"in {format_duration(away)}" if away > 0 else f"{format_duration(-away)} ago"


@command
def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    state: Annotated[
        str, typer.Option(help="dead: show its last dead letter, although a message of this id is alive.")
    ] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the body's bytes to standard output, nothing else.")
    ] = False,
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show where a message is, what it holds, what went wrong and who has it; or what became of it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage, an unknown queue or id, or --raw of a
    message whose body is gone.

    Example: reliq show orders order-42
    """
    check_is_one_of("state", state, ("", "dead"))
    view = admin.show(queue, id)
    body = None if view.size is None else view.body
    value = {name: getattr(view, name) for name in view.__dataclass_fields__}
    letters = [asdict(letter) | {"payload": as_value(letter.payload)} for letter in view.letters]
    lines = facts(_describe_message(view))
    if state:
        if not view.letters:
            see = shell_command("list", queue, options=["--state", "dead"], layout=admin.redis_keys(queue).layout)
            raise ConfigurationError(f"queue {queue!r} has no dead letter of the id {id[:128]!r}; see `{see}`")
        letter, body = view.letters[0], view.letters[0].payload
        value, lines = letters[0] | {"headers": letter.header.headers}, facts(_describe_letter(letter))
    else:
        value |= {"body": None if body is None else as_value(body), "letters": letters}
    if raw:
        if body is None:
            raise ConfigurationError(f"message {id[:128]!r} of queue {queue!r} has no body any more; leave --raw out")
        sys.stdout.buffer.write(body)
        sys.stdout.flush()
        lines = []
    elif body is not None:
        lines += pretty(body)
    return Answer(value, lines)


def _describe_letter(letter: "Letter") -> list[tuple[str, Any]]:
    """Return the names and values of a dead letter, each for one line."""
    names = ("id", "letter", "reason", "raised", "error", "attempts")
    pairs = [(name, getattr(letter, name)) for name in names]
    pairs += [("died", f"{format_time(letter.died)} UTC"), ("key", letter.header.key or "")]
    return pairs + [("header", f"{name}: {value}") for name, value in letter.header.headers.items()]


def _describe_message(view: "MessageView") -> list[tuple[str, Any]]:
    """Return the names and values to show, each for one line."""
    remarks: list[str] = [view.mark] if view.mark else []
    remarks += ["suspect"] if view.suspect and view.mark != "suspect" else []
    if view.size is None and view.state != "ended" and view.mark != "cancelled":
        remarks.append("its body is gone, so it will expire")
    state = f"{view.state} ({', '.join(remarks)})" if remarks else str(view.state)
    if view.state == "ended" and not view.ends:
        state = "ended: acked messages are not kept (set history= to keep them)"
    pairs: list[tuple[str, Any]] = [("id", view.id), ("state", state)]
    pairs += [("published", format_time(view.published) + " UTC")] if view.published is not None else []
    if view.when is not None and view.state not in ("dead", "ended"):
        is_leased = view.state == "unack" and view.mark not in ("nacked", "suspect")
        until = f"until {format_time(view.when)} UTC, unless it is renewed"
        pairs.append(("lease", until) if is_leased else ("due", f"{format_time(view.when)} UTC"))
    pairs += [("key", view.key)] if view.key else []
    pairs += [("priority", view.priority)] if view.priority != "normal" else []
    if view.state == "waiting":
        pairs += [("in its line", f"{view.ahead:,} come before it")] if view.ahead is not None else []
        pairs += [("it waits", describe_wait(view.line))] if view.line is not None else []
    if view.holder is not None:
        place = f"{view.holder.host} pid {view.holder.pid} (worker {view.holder.worker})"
        pairs.append(("runs", f"for {format_duration(view.holder.seconds)} in {place}"))
    if view.attempt is not None:
        pairs.append(("deliveries", f"{view.attempt} (snoozed and released ones are not counted)"))
    pairs += [("retries left", view.retries_left)] if view.retries_left is not None else []
    pairs += [("expires", f"in {format_duration(view.ttl_left)}")] if view.ttl_left is not None else []
    if view.reason:
        pairs.append(("last error", view.summary))
    pairs += [("failed", _describe_failure(note)) for note in reversed(view.failures)]
    pairs += [("header", f"{name}: {value}") for name, value in view.headers.items()]
    if view.taken_seconds is not None:
        pairs.append(("id taken", f"for {format_duration(view.taken_seconds)} more"))
    pairs += [
        ("ended", f"{end.kind} {format_time(end.at or 0)} UTC  {describe_end(end)}".rstrip()) for end in view.ends
    ]
    pairs += [("dead letter", f"{letter.letter}, died {format_time(letter.died)} UTC") for letter in view.letters]
    if not view.searched_all:
        pairs.append(("note", "there are too many dead letters to look through; an older one of it may be among them"))
    return pairs


def _describe_failure(note: FailureNote) -> str:
    """Return one failure in a line: when, which delivery, where, and why."""
    parts = [] if note.at_ms is None else [f"{format_time(clamp_time(note.at_ms / 1000))} UTC "]
    parts += [] if note.attempt is None else [f"attempt {note.attempt}"]
    parts += [] if note.took_ms is None else [f"after {format_duration(note.took_ms / 1000)}"]
    parts += [f"in {note.by}"] if note.by else []
    return " ".join([*parts, note.summary])


@bulk_command
def cancel(
    queue: QueueName,
    ids: Ids = None,
    state: Annotated[
        str, typer.Option(help="Instead of ids: " + " | ".join(CANCELLABLE), autocompletion=words(CANCELLABLE))
    ] = "",
    *,
    where: Which,
    tombstone: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Refuse a publish of these ids for this time.", show_default=False),
    ] = None,
    admin: AdminOption,
) -> Bulk:
    """
    Cancel messages: they do not start; one that runs is not retried, and its handler is told.

    The id of a `cancelled` message is free at once, that of a `running` one stays taken until its end and its `dedup`.

    Example: reliq cancel orders order-42 order-43

    Instead of ids: reliq cancel orders --state pending --match '"tenant":"acme"' --dry-run. Exit codes: 0 cancelled
    or running, 1 Redis did not answer or you did not agree, 2 an unknown queue or id, 130 interrupted.
    """
    if bool(ids) == bool(state):
        raise ConfigurationError("say which messages: ids, or --state with --header, --match or --key")
    if state:
        check_place(state, CANCELLABLE)
        return _of_state(
            admin, queue, state, where, partial(admin.cancel_where, tombstone=tombstone), "Cancel", "cancelled"
        )
    if where.is_set:
        raise ConfigurationError("--header, --match, --key and --dry-run go with --state, not with ids")

    def each_id(on_step: "OnStep") -> Answer:  # noqa: ARG001  one request
        statuses = admin.cancel(queue, ids or [], tombstone=tombstone)
        lines = [f"{status} {id}" for id, status in statuses.items()]
        return Answer(statuses, lines, EXIT_UNKNOWN_ID if "not_found" in statuses.values() else 0)

    return Bulk(each_id, "cancelled")


@bulk_command
def purge(
    queue: QueueName,
    where: WhichOfAny,
    state: Annotated[str, typer.Option(help=" | ".join(PURGEABLE), autocompletion=words(PURGEABLE))] = "",
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Delete the messages of one state, or dead letters, for good; say --dry-run first.

    Example: reliq purge orders --state dead --older-than 3d --dry-run

    With --key alone those are meant that wait for a turn of the key: reliq purge mail --key tenant-7. A message in the
    middle of a list is cancelled: its body goes at once, its id when a worker meets it. Exit codes: 0 done, 1 Redis did
    not answer or you did not agree, 2 an unknown queue, state or id, 130 interrupted.
    """
    state = state or ("waiting" if where.key else "")
    if not state:
        raise ConfigurationError("say which messages: --state, or --key for those that wait in the line of a key")
    check_place(state, PURGEABLE)
    return _of_state(admin, queue, state, where, admin.purge, "Delete", "deleted")


@bulk_command
def move(
    queue: QueueName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The queue that gets them.", autocompletion=queue_names)
    ],
    *,
    state: Annotated[str, typer.Option(help=" | ".join(MOVABLE), autocompletion=words(MOVABLE))],
    where: Which,
    limit: Annotated[int | None, typer.Option(help="The most to move.")] = None,
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

    def run(queue: str, state: str, where: "Filter", *, on_step: "OnStep") -> object:
        return admin.move(queue, other, state, where, limit=limit, on_step=on_step)

    return _of_state(admin, queue, state, where, run, "Move", "moved", f" to {other}", limit)


def _of_state(
    admin: "Admin",
    queue: str,
    state: str,
    where: "Filter",
    run: Callable[..., object],
    verb: str,
    done: str,
    goal: str = "",
    most: int | None = None,
) -> Bulk:
    """Return work on the messages of a state that the filter chooses."""
    where.check(state)
    total = admin.count(queue, state, Filter(key=where.key))
    chosen = "those that match" if where.is_set else f"all {total}"
    what = "dead letters" if state == "dead" else f"{state} messages"
    return Bulk(
        partial(run, queue, state, where),
        done,
        partial(admin.count, queue, state, where),
        total,
        f"{verb} the {what} of {queue}{goal}, {chosen}?",
        most,
        complaints=_missing(admin, queue, where.ids if state == "dead" else frozenset()),
    )


@bulk_command
def redrive(
    queue: QueueName,
    where: WhichOfAny,
    every: Annotated[bool, typer.Option("--all", help="All of them; asks before it acts.")] = False,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="No faster than this: 50/s, 100/m.")] = None,
    limit: Annotated[int | None, typer.Option(help="The most to redrive.")] = None,
    to: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="Into another queue.", autocompletion=queue_names)
    ] = None,
    retries: Annotated[int | None, typer.Option(help="Deliveries after the first; default as before.")] = None,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    *,
    admin: AdminOption,
) -> Bulk:
    """
    Publish dead letters again, oldest first, with fresh retries.

    Example: reliq redrive orders --error 'card declined' --rate 50/s

    Ctrl-C stops it and prints how far it came; run again, it goes on. Exit codes: 0 done, 1 Redis did not answer or you
    did not agree, 2 an unknown queue, id or filter, 130 interrupted.
    """
    if where.is_set == every:
        raise ConfigurationError(
            "say which dead letters: ids, --reason, --raised, --error, an age, --header, --match, --key; or --all"
        )
    run = partial(
        admin.redrive,
        queue,
        where,
        to=to,
        limit=limit,
        rate=None if rate is None else per_second(rate),
        retries=retries,
        delay=duration(delay),
    )
    total = admin.count(queue, "dead")
    asks = f"Redrive {'all ' * (total != 1)}{pluralize(total, 'dead letter')} of {queue}?" if every else ""
    count = partial(admin.count, queue, "dead", where)
    return Bulk(run, "redriven", count, total, asks, limit, complaints=_missing(admin, queue, where.ids))


def per_second(text: str) -> float:
    """Return `50/s`, `100/m`, `1000/h` or a plain number as how many in a second; else raise ConfigurationError."""
    rate = _RATE.fullmatch(text)
    number = float(rate[1]) / _PERIODS[rate[2] or "s"] if rate else 0.0
    if number <= 0:
        raise ConfigurationError(f"--rate is written 50/s, 100/m or 1000/h, not {text[:40]!r}")
    return number


def _missing(admin: "Admin", queue: str, ids: frozenset[str]) -> list[str]:
    """Return a complaint about those of `ids` that have no dead letter, if there are any."""
    missing = sorted(ids - {entry.id for entry in admin.messages(queue, "dead", Filter(ids=ids))}) if ids else []
    see = shell_command("list", queue, options=["--state", "dead"], layout=admin.redis_keys(queue).layout)
    names = ", ".join(id[:128] for id in missing[:20])
    return [f"queue {queue!r} has no dead letter of {names}; see `{see}`"] if missing else []


@command
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
    admin: WholeQueueAdmin,
) -> Answer | Bulk:
    """
    Publish a message and say what became of it.

    Example: reliq publish reports '{}' --id report-2026-11-21 --dedup 86400

    With --jsonl, run the same command again after an interruption: no line is published twice, until --dedup (1d) after
    its message ended. A changed file counts as a new file: all its lines are published.

    Exit codes: 0 published, or all lines are; 1 Redis did not answer or refused; 2 a wrong option, an unreadable file, a
    body or line that is not JSON; 3 nothing was published, because the id is taken or tombstoned.
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
        return Answer(receipt, [f"{receipt.status} {receipt.id}"], 0 if receipt else EXIT_NOT_PUBLISHED)
    if body is not None or id is not None:
        raise ConfigurationError("--jsonl takes bodies and ids from the file: leave out BODY and --id")
    if on_error not in ("stop", "skip"):
        raise ConfigurationError(f"--on-error must be stop or skip, not {on_error[:40]!r}")
    total = jsonl.stat().st_size if jsonl.is_file() else None

    def run(on_step: Callable[[int, int], None]) -> Answer:
        at = 0

        def step(now: int) -> None:
            nonlocal at
            on_step(now - at, now)
            at = now

        done = admin.publish_lines(queue, jsonl, raw=raw, on_error=cast("OnError", on_error), on_step=step, **options)
        numbers = ", ".join(map(str, done.malformed[:_NUMBERS_SHOWN])) + (
            ", …" if len(done.malformed) > _NUMBERS_SHOWN else ""
        )
        complaints = [f"{len(done.malformed)} malformed lines were skipped: {numbers}"] if done.malformed else []
        nothing = done.cancelled and not done.published + done.before
        return Answer(done, code=EXIT_NOT_PUBLISHED if nothing else 0, complaints=complaints)

    return Bulk(run, "published", total=total, summary=lambda _at: "no line is published twice")


def _body(text: str | None) -> bytes:
    if text is None:
        raise ConfigurationError("say the BODY, `-` to read it from stdin, or --jsonl FILE")
    if text != "-":
        return text.encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(LARGEST_BODY + 1)
