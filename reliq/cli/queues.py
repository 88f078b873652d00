"""Commands on queues and their workers, keys, limits, shards and periodic jobs."""

import re
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.admin.screens import account, format_limit, format_missing, format_number, format_rate
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import (
    AdminOption,
    Cron,
    QueueName,
    QueueNames,
    Schedule,
    WholeQueueAdmin,
    Yes,
    choice,
    parsed,
    queue_names,
    time_span,
)
from reliq.cli.output import EXIT_UNFINISHED, EXIT_USAGE, confirm, facts, format_time, format_when
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.message import PRIORITY_LINES, Pause
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reliq.admin import (
        Admin,
        CronState,
        KeyQueue,
        MessageEvent,
        Overview,
        QueueSnapshot,
        Running,
        StackReport,
        Worker,
    )

#: `reliq workers --stacks` waits at most this many seconds for the stacks. A worker reads the request within 5 s.
STACK_SECONDS = 10.0
#: The limits that the option --clear of `reliq limits` can remove.
LIMITS = ("ordered", "per-key", "rate", "burst", "key-rate", "key-burst", "concurrency", "weights")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")
KEY_COLUMNS = ("key", "waiting", "in flight", "weight", "why it waits")
#: Messages with high or low priority wait under internal message keys. For each internal key, the text that `reliq
#: keys` shows instead of the key.
PRIORITY_NAMES = {line: f"(priority {priority})" for priority, line in PRIORITY_LINES.items()}

cron = typer.Typer(help="List periodic jobs, or run a periodic job now.", no_args_is_help=True, add_completion=False)


# ---- texts for the output ---------------------------------------------------


def describe_end(end: "MessageEvent") -> str:
    """
    Return why a message ended, with the number of its last delivery and the error.

    For an acked message, return how long its handler ran.
    """
    if end.took is not None:
        return f"after {format_duration(end.took)}"
    attempt = f" (delivery {end.attempt})" if end.attempt is not None else ""
    return f"{end.reason}{attempt}" + (f": {end.error}" if end.error else "") if end.reason else ""


def describe_pause(pause: Pause, now: float) -> str:
    """Return a text that describes a pause: its author, age, remaining time and reason. `now` is in unix seconds."""
    text = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        text += f" {format_duration(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        text += f", for {format_duration(max(0.0, pause.until - now))} more"
    return text + (f": {pause.reason}" if pause.reason else "")


def describe_wait(key_queue: "KeyQueue") -> str:
    """Return why the messages of a message key wait; an empty text if no message waits."""
    if key_queue.state == "asleep" and key_queue.asleep_until is not None:
        return f"throttled until {format_time(key_queue.asleep_until)}"
    return {
        "in turn": "in turn for a worker",
        "paused": "paused until `reliq resume --key`",
        "saturated": "saturated: as many messages of the key run as its limit allows",
        "standing": "stuck although no limit blocks it: `reliq check --repair` repairs it",
    }.get(key_queue.state, "")


def _describe_throttling(queue: str, until: float) -> str:
    return (
        f"{queue} is throttled until {format_time(until)}: a handler raised RateLimited for a message without a key; "
        f"`{shell_command('resume', queue)}` resumes it"
    )


def _age_of(times: "Iterable[float]") -> list[str]:
    """
    Return a line such as `as of 5s ago` with the age of the oldest worker report, unless it is at most 1 s old.

    `times` are the times of the reports in unix seconds.
    """
    age = max((time.time() - at for at in times), default=0.0)
    return [f"as of {format_duration(age)} ago"] if age > 1 else []


# ---- whole queues -----------------------------------------------------------


@command
def queues(
    queues: QueueNames = None,
    scan: Annotated[bool, typer.Option("--scan", help="Also search all Redis keys for unregistered queues.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Show the totals of each queue; exit with 1 if they do not add up.")
    ] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show each queue: messages by state, age of the oldest, rates of the last minute, and workers.

    --check shows the totals of each queue: how many messages were published, how many ended and in which way, and how
    many are left. They must add up, except in a layout of the Go library, whose programs count no messages. Exit codes:
    0 done; 1 Redis is unavailable or refuses, or with --check the totals of a queue do not add up; 2 wrong usage or an
    unknown queue.

    Example: reliq queues orders mails --check
    """
    overview = admin.queues(queues or (), scan=scan)
    accounts = [account(view, view.layout) for view in overview.queues]
    pairs = list(zip(overview.queues, accounts, strict=True))
    value = {
        "queues": [asdict(view) | {"account": numbers} for view, numbers in pairs],
        "unreadable": overview.unreadable,
        "left_out": overview.left_out,
    }
    if check:
        unreadable = [f"{name} cannot be read: {error}" for name, error in overview.unreadable.items()]
        lines = [line for view, numbers in pairs for line in _describe_account(view, numbers)]
        is_unbalanced = bool(unreadable) or any(numbers["missing"] for numbers in accounts)
        return Answer(value, lines + unreadable, int(is_unbalanced))
    counts = ("ready", "pending", "running", "backoff", "retry", "garbage", "dead")
    columns = ("queue", "late", *counts, *RATE_COLUMNS, "workers", "waiting", "shards", "layout")
    table = Table(columns, map(_queue_row, overview.queues))
    is_empty = not overview.queues and not overview.unreadable
    nothing = ["No queue is registered; --scan searches for unregistered queues."] if is_empty else []
    return Answer(value, [table, *nothing, *describe_overview(overview)])


def describe_overview(overview: "Overview") -> "Iterator[str]":
    """
    Yield a line for each queue that is paused, throttled or unreadable.

    Also yield a line if the workers are unknown, and a line if the overview does not contain all queues.
    """
    for view in overview.queues:
        if view.pause is not None:
            yield f"{view.queue} is {describe_pause(view.pause, time.time())}"
        if view.away:
            yield f"{view.queue} is {format_missing(view.away)}"
        if view.lines and view.lines.asleep_until:
            yield _describe_throttling(view.queue, view.lines.asleep_until)
    if overview.workers is None:
        yield f"The workers are unknown: {overview.unknown}."
    for name, error in overview.unreadable.items():
        yield f"{name} cannot be read: {error}"
    if overview.left_out:
        yield (
            f"{overview.left_out} more registered queues are not shown: name them, such as `reliq queues orders`; "
            "`reliq delete` removes unused queues."
        )


def _queue_row(view: "QueueSnapshot") -> tuple[Any, ...]:
    running = view.unack - view.backoff
    counts = (view.ready, view.pending, running, view.backoff, view.retry, view.garbage, view.dead)
    rates = (view.rates.arrived, view.rates.acked, view.rates.failed) if view.rates else ()
    return (
        view.queue,
        "-" if view.late is None else format_duration(view.late),
        *map(format_number, counts),
        *(map(format_rate, rates) if rates else ("", "", "")),
        "?" if view.workers is None else view.workers,
        view.waiting if view.lines else "",
        view.shards if view.shards > 1 else "",
        view.layout if view.layout != "reliq" else "",
    )


def _describe_account(view: "QueueSnapshot", numbers: "Mapping[str, int | None]") -> list[str]:
    """
    Return lines with the totals of a queue, and a line about whether they add up.

    They add up if the number of published messages equals the number of ended and living messages.
    """
    missing = numbers["missing"]
    totals = [(kind, f"{number:,}") for kind, number in numbers.items() if kind != "missing"]
    if missing is None:
        verdict = "These totals may not add up: Go programs that share the queue do not count."
    elif missing == 0:
        verdict = "It adds up."
    else:
        verdict = (
            f"It does not add up: {abs(missing):,} {'more' if missing > 0 else 'fewer'} came in than ended or are alive. "
            "Redis lost a write, or another program changed its keys."
        )
    partial = [f"The account is {format_missing(view.away)}."] if view.away else []
    return [f"{view.queue}:", *facts(totals), verdict, *partial]


@command
def pause(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Pause only this message key.")] = "",
    cron: Cron = "",
    schedule: Schedule = "",
    reason: Annotated[
        str, typer.Option(help="Reason for the pause; `reliq queues`, `watch` and `cron list` show it.")
    ] = "",
    for_: Annotated[float | None, time_span("Resume automatically after this time, for example 30m.", "--for")] = None,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Pause a queue, a message key or a periodic job; running handlers finish.

    Example: reliq pause orders --reason 'the gateway is down' --for 30m

    Workers stop claiming messages within a second; publishing continues. With --key, only messages of this key do not
    start: `reliq pause mail --key tenant-7 --for 10m`. With --cron, the ticks of a periodic job are skipped and
    counted: `reliq pause reports --cron daily`. With --schedule, the ticks of a schedule that was made at run time are
    skipped. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or job, or a wrong option.
    """
    subject = _subject(queue, key, cron, schedule)
    value: Any
    if key:
        if reason:
            raise ConfigurationError("a pause of a message key stores no reason; leave --reason or --key out")
        admin.pause_key(queue, key, for_=for_)
        value = admin.key(queue, key)
    elif cron or schedule:
        if for_:
            raise ConfigurationError("a periodic job is paused until you resume it; leave --for out")
        (admin.pause_cron if cron else admin.pause_schedule)(queue, cron or schedule, reason=reason)
        value = {"paused": True, "queue": queue}
    else:
        admin.pause(queue, reason=reason, for_=for_)
        value = admin.paused(queue)
    given = {"--key": key, "--cron": cron, "--schedule": schedule}
    options = [word for option, name in given.items() if name for word in (option, name)]
    end = shell_command("resume", queue, options=options, layout=admin.redis_keys(queue).layout)
    return Answer(value, [f"{subject} is paused" + (f" for {format_duration(for_)}" if for_ else f"; `{end}` ends it")])


@command
def resume(
    queue: QueueName,
    key: Annotated[
        str,
        typer.Option("--key", metavar="KEY", help="Resume only this message key, whether it is paused or throttled."),
    ] = "",
    cron: Cron = "",
    schedule: Schedule = "",
    *,
    admin: AdminOption,
) -> Answer:
    """
    Resume a paused queue, message key or periodic job.

    Example: reliq resume orders

    --key also resumes a message key that its rate limit or a handler throttles. With --cron, the
    periodic job is published from its next tick on. Exit codes: 0 done, also when nothing was paused; 1 Redis did not
    answer; 2 an unknown queue or job, or a wrong key.
    """
    subject = _subject(queue, key, cron, schedule)
    if key:
        was_paused = admin.resume_key(queue, key)
    elif schedule:
        was_paused = admin.resume_schedule(queue, schedule)
    else:
        was_paused = admin.resume_cron(queue, cron) if cron else admin.resume(queue)
    return Answer({"was_paused": was_paused}, [f"{subject} is resumed" if was_paused else f"{subject} was not paused"])


def _subject(queue: str, key: str = "", cron: str = "", schedule: str = "") -> str:
    if len([name for name in (key, cron, schedule) if name]) > 1:
        raise ConfigurationError("give only one of --key, --cron and --schedule")
    return f"key {key} of {queue}" if key else f"{cron or schedule} of {queue}" if cron or schedule else queue


@command
def delete(
    queues: Annotated[
        list[str],
        typer.Argument(metavar="QUEUE", help="Queues to delete, which are no longer used.", autocompletion=queue_names),
    ],
    *,
    cron: Cron = "",
    schedule: Schedule = "",
    letters: Annotated[bool, typer.Option("--letters", help="Also delete the dead letters of these queues.")] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Delete empty queues with their totals and their list of ended messages.

    A queue is not deleted if it has messages or dead letters, is served by a worker, or was used within the last minute.
    With --letters, a queue with dead letters is deleted too. Publishing to a deleted queue registers it again. With
    --cron, the command keeps the queues and deletes the stored state of a periodic job that is no longer in your code:
    its last tick, counts and pause. With --schedule, it deletes a schedule that was made at run time.

    Example: reliq delete orders-old --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not confirm, 2 an unknown queue or job, or a queue in use.
    """
    subjects = [_subject(queue, cron=cron, schedule=schedule) for queue in queues]
    confirm(f"Delete {', '.join(subjects)}?", yes=yes)
    deleted: dict[str, int] = {}  # the number of dead letters of each deleted queue; 0 for a periodic job or schedule
    refused = []
    for queue, subject in zip(queues, subjects, strict=True):
        try:
            if cron:
                admin.delete_cron(queue, cron)
            elif schedule:
                admin.delete_schedule(queue, schedule)
            deleted[subject] = 0 if cron or schedule else admin.delete_queue(queue, letters=letters)
        except ConfigurationError as error:
            refused.append(str(error))
    with_letters = [f", with {pluralize(count, 'dead letter')}" if count else "" for count in deleted.values()]
    lines = [f"{subject} is deleted{more}" for subject, more in zip(deleted, with_letters, strict=True)]
    value = {"deleted": list(deleted), "letters": sum(deleted.values())}
    return Answer(value, lines, EXIT_USAGE if refused else 0, refused)


# ---- periodic jobs ----------------------------------------------------------


@cron.command("list")
@command
def list_crons(queues: QueueNames = None, *, admin: WholeQueueAdmin) -> Answer:
    """
    List periodic jobs: the last and next tick of each, and how many ticks were missed or skipped, and why.

    Example: reliq cron list reports

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue.
    """
    entries = admin.crons(queues or ())
    if not entries:
        return Answer([], ["There is no periodic job; declare it with @consumer.cron(…), and start a worker."])
    columns = ("name", "queue", "schedule", "next", "last", "missed", "paused", "overlap", "last message")
    table = Table(columns, map(_cron_row, entries), ("schedule", "last message"))
    workers = None
    with suppress(RedisUnavailableError):
        workers = admin.workers()
    return Answer(entries, [table, *(line for entry in entries for line in describe_problems(entry, workers))])


def _cron_row(entry: "CronState") -> tuple[Any, ...]:
    coming, last = format_when(entry.next) or "?", format_when(entry.ticked) or "never"
    skipped = (entry.skipped["paused"], entry.skipped["overlap"])
    message = entry.last_id + (" (alive)" if entry.is_alive else "")
    return entry.name, entry.queue, entry.schedule, coming, last, entry.missed, *skipped, message


def describe_problems(entry: "CronState", workers: "Sequence[Worker] | None") -> "Iterator[str]":
    """
    Yield a line if a periodic job is paused, and a line for each problem of the job.

    `workers` are the live worker processes; None if they are unknown.
    """
    if entry.pause:
        yield f"{entry.name}: {describe_pause(entry.pause, time.time())}"
    if not entry.is_served and workers is None:
        silent = format_duration(time.time() - entry.seen)
        yield f"{entry.name}: no worker has reported it for {silent}, and the workers are unknown"
    elif not entry.is_served:
        delete = shell_command("delete", entry.queue, options=["--cron", entry.name], layout=entry.layout)
        why = f"none runs. Start one, or delete the job if it is no longer in the code: `{delete}`"
        if workers:
            why = f"{pluralize(len(workers), 'worker process runs', 'worker processes run')}, without it in the code"
        yield f"{entry.name}: no worker has it: {why}"
    elif entry.late > TICK_LATE_SECONDS:
        late = format_duration(entry.late)
        yield (
            f"{entry.name}: its tick is {late} late, although a worker runs it: its body function fails, or Redis refuses the "
            "publish. The logs of the worker have the error"
        )
    if entry.next is None:
        yield f"{entry.name}: this version of reliq cannot read its schedule"


@cron.command()
@command
def run(
    queue: QueueName,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the periodic job, as `reliq cron list` prints it.")
    ],
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Publish the message of a periodic job now, even if the job is paused; its schedule stays the same.

    A running worker with this job in its code publishes the message.

    Example: reliq cron run reports daily-report

    Exit codes: 0 published, 1 Redis did not answer, 2 the job does not exist, or no running worker has it in its code.
    """
    id = admin.run_cron(queue, name)
    return Answer({"id": id, "queue": queue}, [f"published {id} to {queue}"])


@command
def schedules(
    queue: QueueName,
    *,
    prefix: Annotated[str, typer.Option(help="Only schedules whose names start with this text.")] = "",
    limit: Annotated[int, typer.Option(help="Show at most this many schedules.")] = 100,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    List the schedules of a queue that were made at run time: the next tick of each, and its pause.

    Example: reliq schedules reports --prefix tenant-

    To pause, resume or delete a schedule, use `reliq pause`, `resume` or `delete` with --schedule NAME. Exit codes: 0
    done, 1 Redis did not answer, 2 an unknown queue.
    """
    found = admin.schedules(queue, prefix=prefix, limit=limit + 1)
    rows = [
        (one.name, one.schedule or "?", format_when(one.next) or ("paused" if one.pause else "none"), one.body_bytes)
        for one in found[:limit]
    ]
    lines: list[object] = [Table(("name", "schedule", "next", "bytes"), rows, ("schedule",))] if rows else []
    lines += [f"{one.name}: {describe_pause(one.pause, time.time())}" for one in found[:limit] if one.pause]
    if len(found) > limit:
        lines.append(f"There are more than {limit:,}: --prefix or --limit shows others.")
    return Answer(found[:limit], lines or [f"{queue} has no stored schedule; Queue.schedule(…) makes one."])


# ---- keys, limits and shards ------------------------------------------------


def _weight(text: str) -> tuple[str, int]:
    """Split a text such as `vip=4` into a message key and its weight. Raise ConfigurationError if it is malformed."""
    match = re.fullmatch("(.+)=([0-9]{1,9})", text, re.DOTALL)
    if match is None:
        raise ConfigurationError(f"write a weight as KEY=N, such as vip=4, not {text[:80]!r}")
    return match[1], int(match[2])


@command
def limits(
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="Name of the queue.", autocompletion=queue_names)
    ] = None,
    *,
    shared: Annotated[
        bool, typer.Option("--shared", help="Show the limits that queues share, and how many messages may start now.")
    ] = False,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Run one message of a key at a time, in publish order.")
    ] = False,
    per_key: Annotated[int | None, typer.Option(help="How many messages of one key may run at the same time.")] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N/s",
            help="Rate at which messages may start: 100/s, 5/m, 1000/h or '100000/m by cost'; may be given again.",
        ),
    ] = None,
    burst: Annotated[
        list[int] | None,
        typer.Option(
            help="The burst of each --rate: how many messages may start together after a quiet time; for a rate by cost, the sum of their costs."
        ),
    ] = None,
    key_rate: Annotated[
        str | None, typer.Option(metavar="N/s", help="Rate at which messages of each key may start, for example 5/s.")
    ] = None,
    key_burst: Annotated[
        int | None,
        typer.Option(help="With --key-rate: how many messages of a key may start together after a quiet time."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="How many messages of the queue may run at the same time.")
    ] = None,
    weight: Annotated[
        list[Any] | None,
        parsed(_weight, "Give KEY N turns for one turn of any other key; may be given again.", metavar="KEY=N"),
    ] = None,
    clear: Annotated[
        list[str] | None, choice(LIMITS, "Limit to remove, or weight:KEY for one weight; may be given again: ")
    ] = None,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the limits of a queue, or change them while workers run: order, concurrency, rates, weights.

    Example: reliq limits mail --per-key 4 --rate 100/s --weight vip=4

    Workers apply a change within a second; with 100,000 throttled keys, within a few seconds. If you later change the
    limits in the code and start a worker with it, the limits in the code replace your change. Exit codes: 0 done, 1 Redis
    did not answer, 2 an unknown queue, a limit that is not allowed, or a queue that cannot have limits.
    """
    options = {
        "ordered": ordered or None,
        "per_key": per_key,
        "rate": rate or None,
        "burst": burst or None,
        "key_rate": key_rate,
        "key_burst": key_burst,
        "concurrency": concurrency,
        "key_weights": dict(weight) if weight else None,
    }
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if shared == (queue is not None) or (shared and (changes or clear)):
        raise ConfigurationError(
            "give either a queue, or --shared without other options; you can change shared limits only in the code"
        )
    if queue is None:
        found = admin.shared_limits()
        rows = [(one.name, one.rate, one.burst, one.free) for one in found]
        return Answer(found, [Table(("limit", "rate", "burst", "free"), rows)] if rows else ["no shared limits"])
    names = {name: name.replace("-", "_") for name in LIMITS} | {"weights": "key_weights"}
    cleared = [names.get(name, name) for name in clear or ()]
    in_force = admin.set_limits(queue, clear=cleared, **changes) if changes or clear else admin.limits(queue)
    shown = [(name, format_limit(getattr(in_force, field))) for name, field in names.items() if name != "weights"]
    shown += [("weight", f"{key}={number}") for key, number in in_force.key_weights.items()]
    return Answer(in_force, facts(shown) or [f"{queue} has no limits"])


@command
def keys(
    queue: QueueName,
    *,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Show only this message key.")] = None,
    limit: Annotated[int, typer.Option(help="Show at most this many message keys, up to 200.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Show all message keys, unsorted.")] = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show message keys with waiting or running messages, the largest first, and why they wait.

    Example: reliq keys mail

    A waiting key is `in turn` (the next worker with a free slot takes it), `throttled` (by its rate or a
    handler), `paused` (until `reliq resume --key`), or `saturated` (until a running message of the key ends). If a queue
    has very many keys, the command finds the largest by sampling; --all shows all keys. Exit codes: 0 done, 1 Redis did
    not answer, 2 an unknown queue or a wrong key.
    """
    if every and key is not None:
        raise ConfigurationError("give --key or --all, not both")
    if every:
        rows = list(admin.each_key(queue))
        return Answer(rows, [Table(KEY_COLUMNS, map(_key_row, rows), ("key",))])
    if key is not None:
        row = admin.key(queue, key)
        return Answer(row, [Table(KEY_COLUMNS, [_key_row(row)], ("key",))])
    view = admin.keys(queue, limit=limit)
    lines: list[object] = [Table(KEY_COLUMNS, map(_key_row, view.largest), ("key",))]
    lines.append(
        f"{view.waiting:,} waiting, {view.running:,} running; "
        f"{pluralize(view.in_turn, 'key')} in turn, {view.asleep:,} throttled or paused"
    )
    if view.asleep_until is not None:
        lines.append(f"{_describe_throttling(queue, view.asleep_until)}.")
    elif view.is_full:
        see = shell_command("limits", queue)
        lines.append(f"None may start now: the rate or concurrency of {queue} is used up; see `{see}`.")
    return Answer(view, lines)


def _key_row(row: "KeyQueue") -> tuple[Any, ...]:
    return PRIORITY_NAMES.get(row.key, row.key), row.waiting, row.in_flight, f"{row.weight:g}", describe_wait(row)


@command
def shards(
    queue: QueueName,
    number: Annotated[
        int | None, typer.Argument(metavar="[NUMBER]", help="New number of shards, a power of two.")
    ] = None,
    *,
    finish: Annotated[
        bool,
        typer.Option("--finish", help="Finish a change of the number of shards now, instead of waiting for workers."),
    ] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the shards of a queue, or change their number while the queue is in use.

    A change of the number starts immediately. Workers then move messages to their new shards and finish the change;
    with --finish, this command finishes it now. Until the change is finished, a publish with a chosen id takes two
    calls to Redis, and you cannot start another change.

    Example: reliq shards orders 16 --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not confirm, 2 an unknown queue or a wrong number, 3 not finished.
    """
    if number is not None:
        confirm(f"Have {number} shards of {queue}? Every publisher must be of a version with shards.", yes=yes)
        admin.resize(queue, number)
    left = admin.finish_resize(queue) if finish else 0
    view = admin.shards(queue)
    states = ("pending", "ready", "unack", "retry", "dead")
    rows = [
        (at, *(getattr(counts, state) if counts else "?" for state in states)) for at, counts in enumerate(view.counts)
    ]
    change = ""
    if view.map.was != view.map.n:
        finish_command = shell_command("shards", queue, options=["--finish"])
        change = f"; {view.map.state}, there were {view.map.was}: workers finish the change, or run `{finish_command}`"
    lines = [
        Table(("shard", *states), rows),
        f"{queue} has {pluralize(view.map.n, 'shard')} (epoch {view.map.epoch}){change}",
        *([f"{queue} is {format_missing(view.away)}"] if view.away else []),
        *([f"not finished: {pluralize(left, 'message')} that workers run or are claiming"] if left else []),
    ]
    value = {"map": view.map, "counts": view.counts, "away": view.away, "left": left}
    return Answer(value, lines, EXIT_UNFINISHED if left else 0)


# ---- workers ----------------------------------------------------------------


@command
def workers(
    queues: QueueNames = None,
    running: Annotated[
        bool, typer.Option("--running", help="Show running handlers instead of processes; the longest-running first.")
    ] = False,
    longer_than: Annotated[
        float | None, time_span("With --running: only handlers that have run longer than this, for example 10m.")
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="With --running: show the stack of each handler; takes up to 10 s.")
    ] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show each live worker process: its host, queues and busy slots.

    Workers report every 5 s, so a killed process is shown for up to 15 s more. --running shows at most 200 handlers of
    each process, and not the messages that a program gets with `Queue.receive`. A stack shows files, lines and
    functions, but no values of variables. Exit codes: 0 done (also without any worker), 1 Redis is unavailable or
    refuses, 2 wrong usage or an unknown queue.

    Example: reliq workers orders --running --longer-than 10m
    """
    if running:
        return _running(admin, queues or [], longer_than or 0, stacks=stacks)
    if stacks or longer_than is not None:
        raise ConfigurationError("--stacks and --longer-than need --running")
    wanted = {admin.redis_keys(name).name for name in queues or ()}
    alive = [worker for worker in admin.workers() if not wanted or wanted & set(worker.queues)]
    if not alive:
        return Answer([], ["No worker is alive."])
    now = time.time()
    rows = [
        (
            worker.id,
            worker.host,
            worker.pid,
            worker.version,
            f"{worker.busy}/{worker.slots}",
            format_duration(max(0.0, now - worker.started)),
            f"{format_duration(max(0.0, now - worker.last_claim))} ago",
            " ".join(worker.queues),
        )
        for worker in alive
    ]
    columns = ("worker", "host", "pid", "version", "busy", "up", "last claim", "queues")
    return Answer(alive, [Table(columns, rows, ("worker", "host", "queues")), *_age_of(one.seen for one in alive)])


def _running(admin: "Admin", queues: "Sequence[str]", longer_than: float, *, stacks: bool) -> Answer:
    """
    Return the messages whose handlers run, for `reliq workers --running`.

    With `stacks`, add the stack trace of each handler.
    """
    rows = []
    for name in queues or {name for worker in admin.workers() for name in worker.queues}:
        # If the user has not named queues, skip a queue that raises an error: it has another layout, or no message yet.
        with nullcontext() if queues else suppress(ConfigurationError):
            rows += admin.running(name, longer_than=longer_than)
    if not rows:
        nothing = "Nothing runs" + (f" for {format_duration(longer_than)}." if longer_than else ".")
        is_bare = any(admin.redis_keys(name).bare for name in queues)
        return Answer([], [nothing, *["Programs in Go do not report running messages."] * is_bare])
    rows.sort(key=lambda row: -row.seconds)
    reports = admin.stacks({row.worker for row in rows}, for_seconds=STACK_SECONDS) if stacks else {}
    value = [asdict(row) | ({"stack": _frames(reports, row)} if stacks else {}) for row in rows]
    cells = [
        (row.queue, row.id, row.attempt, format_duration(row.seconds), row.host, row.pid, row.worker) for row in rows
    ]
    lines: list[object] = [Table(("queue", "id", "attempt", "for", "host", "pid", "worker"), cells, ("host", "worker"))]
    for row in rows if stacks else ():
        frames = _frames(reports, row)
        missing = "has ended meanwhile"
        if frames is None:
            missing = "no answer: a handler blocks the interpreter of this process, or its reliq version is older"
        lines += ["", f"{row.id} in {row.host}:{row.pid}", *(f"  {line}" for line in frames or [missing])]
    return Answer(value, [*lines, *_age_of(row.seen for row in rows)])


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> "Sequence[str] | None":
    """
    Return the stack of a running handler; None if its worker process did not send its stacks.

    If the handler has ended meanwhile, return an empty stack.
    """
    if row.worker not in reports:
        return None
    stacks = reports[row.worker].stacks
    return next((stack.frames for stack in stacks if (stack.queue, stack.id) == (row.queue, row.id)), ())
