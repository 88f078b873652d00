"""Commands on queues and their workers, keys, limits, shards and periodic jobs."""

import re
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.admin.screens import account, format_missing, format_number, format_rate
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import (
    AdminOption,
    Cron,
    QueueName,
    QueueNames,
    WholeQueueAdmin,
    Yes,
    choice,
    parsed,
    queue_names,
    time_span,
)
from reliq.cli.output import EXIT_UNFINISHED, EXIT_USAGE, confirm, facts, format_time, format_when
from reliq.errors import ConfigurationError
from reliq.message import PRIORITY_LINES, Pause
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reliq.admin import Admin, CronState, KeyQueue, MessageEvent, Overview, QueueSnapshot, Running, StackReport

#: `workers --stacks` waits this long for the stacks: workers read the request at most 5 s after it.
STACK_SECONDS = 10.0
#: The limits that `limits --clear` takes, as the options spell them.
LIMITS = ("ordered", "per-key", "rate", "burst", "key-rate", "key-burst", "concurrency", "weights")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")
KEY_COLUMNS = ("key", "waiting", "in flight", "weight", "why it waits")
#: Names of the key queues of priorities.
PRIORITY_NAMES = {line: f"(priority {priority})" for priority, line in PRIORITY_LINES.items()}

cron = typer.Typer(help="Periodic entries: list them, run one.", no_args_is_help=True, add_completion=False)


# ---- texts ------------------------------------------------------------------


def describe_end(end: "MessageEvent") -> str:
    """Return the reason of an end, as far as it is known."""
    if end.took is not None:
        return f"after {format_duration(end.took)}"
    attempt = f" (delivery {end.attempt})" if end.attempt is not None else ""
    return f"{end.reason}{attempt}" + (f": {end.error}" if end.error else "") if end.reason else ""


def describe_pause(pause: Pause, now: float) -> str:
    """Return the author, age, end and reason of a pause."""
    text = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        text += f" {format_duration(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        text += f", for {format_duration(max(0.0, pause.until - now))} more"
    return text + (f": {pause.reason}" if pause.reason else "")


def describe_wait(key_queue: "KeyQueue") -> str:
    """Return the reason why the messages of a key wait."""
    if key_queue.state == "asleep" and key_queue.asleep_until is not None:
        return f"asleep until {format_time(key_queue.asleep_until)}"
    return {
        "in turn": "in turn for a worker",
        "paused": "paused until `reliq resume --key`",
        "saturated": "saturated: all its places are taken",
        "standing": "standing for no reason: `reliq check --repair` mends it",
    }.get(key_queue.state, "")


def _describe_sleep(queue: str, until: float) -> str:
    return (
        f"{queue} sleeps until {format_time(until)}: a handler raised RateLimited for a message without a key; "
        f"`{shell_command('resume', queue)}` wakes it"
    )


def _age_of(times: "Iterable[float]") -> list[str]:
    """Return the age of the oldest worker record when it is over a second."""
    age = max((time.time() - at for at in times), default=0.0)
    return [f"as of {format_duration(age)} ago"] if age > 1 else []


# ---- whole queues -----------------------------------------------------------


@command
def queues(
    queues: QueueNames = None,
    scan: Annotated[bool, typer.Option("--scan", help="Also search all Redis keys for unregistered queues.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Show accounts; exit 1 when one does not add up.")] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show every queue: its messages by state, the age of the oldest, its rates of the last minute, its workers.

    `reliq watch` shows the rates between two refreshes. --check shows the account of each queue: how many messages came in,
    how they ended, how many are alive, and whether that adds up. In a layout of the Go original, whose programs count
    nothing, it need not. Exit codes: 0 done, 1 Redis is away or refuses, or with --check an account does not add up; 2 wrong
    usage or an unknown queue.

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
    counts = ("ready", "pending", "leased", "backoff", "retry", "garbage", "dead")
    columns = ("queue", "late", *counts, *RATE_COLUMNS, "workers", "waiting", "shards", "layout")
    table = Table(columns, map(_queue_row, overview.queues))
    is_empty = not overview.queues and not overview.unreadable
    nothing = ["There is no queue in the registry; --scan looks for others."] if is_empty else []
    return Answer(value, [table, *nothing, *describe_overview(overview)])


def describe_overview(overview: "Overview") -> "Iterator[str]":
    """Yield a line for each pause, queue that sleeps, and Redis or queue that cannot be read."""
    for view in overview.queues:
        if view.pause is not None:
            yield f"{view.queue} is {describe_pause(view.pause, time.time())}"
        if view.away:
            yield f"{view.queue} is {format_missing(view.away)}"
        if view.lines and view.lines.asleep_until:
            yield _describe_sleep(view.queue, view.lines.asleep_until)
    if overview.workers is None:
        yield "The workers are unknown: the Redis of their registry is away."
    for name, error in overview.unreadable.items():
        yield f"{name} cannot be read: {error}"
    if overview.left_out:
        yield (
            f"The registry has {overview.left_out} more, which are not shown: name them, such as `reliq queues orders`; "
            "`reliq delete` removes those that are no more."
        )


def _queue_row(view: "QueueSnapshot") -> tuple[Any, ...]:
    leased = view.unack - view.backoff
    counts = (view.ready, view.pending, leased, view.backoff, view.retry, view.garbage, view.dead)
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
    """Return the totals of a queue, and whether the messages that came in have ended or are alive."""
    missing = numbers["missing"]
    totals = [(kind, f"{number:,}") for kind, number in numbers.items() if kind != "missing"]
    if missing is None:
        verdict = "It need not add up: programs in Go that share the queue count nothing."
    elif missing == 0:
        verdict = "It adds up."
    else:
        verdict = (
            f"It does not add up: {abs(missing):,} {'more' if missing > 0 else 'fewer'} came in than ended or are alive. "
            "Redis lost a write, or something else than reliq changed its keys."
        )
    partial = [f"The account is {format_missing(view.away)}."] if view.away else []
    return [f"{view.queue}:", *facts(totals), verdict, *partial]


@command
def pause(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key: it sleeps.")] = "",
    cron: Cron = "",
    reason: Annotated[str, typer.Option(help="Why; shown by `queues`, `watch` and `cron list`.")] = "",
    for_: Annotated[float | None, time_span("Resume by itself after this time, for example 30m.", "--for")] = None,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Have consumers stop claiming within a second; running handlers finish, and publishing goes on.

    Example: reliq pause orders --reason 'the gateway is away' --for 30m

    With --key only messages of one key do not start: reliq pause mail --key tenant-7 --for 10m. With --cron the ticks of a
    periodic entry are skipped and counted: reliq pause reports --cron daily. Exit codes: 0 done, 1 Redis did not answer, 2
    an unknown queue or entry, or a wrong option.
    """
    subject = _subject(queue, key, cron)
    value: Any
    if key:
        if reason:
            raise ConfigurationError("a reason is kept of a queue's pause alone; leave --reason or --key out")
        admin.pause_key(queue, key, for_=for_)
        value = admin.key(queue, key)
    elif cron:
        if for_:
            raise ConfigurationError("a periodic entry is paused until it is resumed; leave --for or --cron out")
        admin.pause_cron(queue, cron, reason=reason)
        value = {"paused": True, "queue": queue}
    else:
        admin.pause(queue, reason=reason, for_=for_)
        value = admin.paused(queue)
    options = ["--key", key] if key else ["--cron", cron] if cron else []
    end = shell_command("resume", queue, options=options, layout=admin.redis_keys(queue).layout)
    return Answer(value, [f"{subject} is paused" + (f" for {format_duration(for_)}" if for_ else f"; `{end}` ends it")])


@command
def resume(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only this key: it sleeps no more.")] = "",
    cron: Cron = "",
    *,
    admin: AdminOption,
) -> Answer:
    """
    Have consumers claim a paused queue again.

    Example: reliq resume orders

    With --key one key sleeps no more, paused or not; with --cron the ticks of a periodic entry are published again, from
    the next tick on. Exit codes: 0 done, also when nothing was paused; 1 Redis did not answer; 2 an unknown queue or
    entry, or a wrong key.
    """
    subject = _subject(queue, key, cron)
    if key:
        was_paused = admin.resume_key(queue, key)
    else:
        was_paused = admin.resume_cron(queue, cron) if cron else admin.resume(queue)
    return Answer({"was_paused": was_paused}, [f"{subject} is resumed" if was_paused else f"{subject} was not paused"])


def _subject(queue: str, key: str = "", cron: str = "") -> str:
    if key and cron:
        raise ConfigurationError("say --key or --cron, not both")
    return f"key {key} of {queue}" if key else f"{cron} of {queue}" if cron else queue


@command
def delete(
    queues: Annotated[
        list[str], typer.Argument(metavar="QUEUE", help="Queues that are no more.", autocompletion=queue_names)
    ],
    *,
    cron: Cron = "",
    letters: Annotated[bool, typer.Option("--letters", help="Delete their dead letters too.")] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Delete queues with nothing in them: their names from the registry, their totals and ends.

    Refused is a queue that has messages, has dead letters (without --letters), is served by a worker, or was in use
    within the last minute; the others go. A queue that is published to again is registered again. With --cron the queues
    stay, and the state of a periodic entry goes that is no longer in the code: its last tick, counts and pause.

    Example: reliq delete orders-old --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or entry, or a queue in use.
    """
    confirm(f"Forget {', '.join(_subject(queue, cron=cron) for queue in queues)}?", yes=yes)
    forgotten: dict[str, int] = {}  # subject -> its dead letters
    refused = []
    for queue in queues:
        try:
            if cron:
                admin.delete_cron(queue, cron)
            forgotten[_subject(queue, cron=cron)] = 0 if cron else admin.delete_queue(queue, letters=letters)
        except ConfigurationError as error:
            refused.append(str(error))
    with_letters = [f", with {pluralize(count, 'dead letter')}" if count else "" for count in forgotten.values()]
    lines = [f"{subject} is deleted{more}" for subject, more in zip(forgotten, with_letters, strict=True)]
    value = {"deleted": list(forgotten), "letters": sum(forgotten.values())}
    return Answer(value, lines, EXIT_USAGE if refused else 0, refused)


# ---- periodic jobs ----------------------------------------------------------


@cron.command("list")
@command
def list_crons(queues: QueueNames = None, *, admin: WholeQueueAdmin) -> Answer:
    """
    List periodic entries: when each ticks next and did last, and how many ticks were missed or skipped, and why.

    Example: reliq cron list reports

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue.
    """
    entries = admin.crons(queues or ())
    if not entries:
        return Answer([], ["There is no periodic entry; @consumer.cron(…) makes one, and a worker brings it here."])
    columns = ("name", "queue", "schedule", "next", "last", "missed", "paused", "overlap", "last message")
    table = Table(columns, map(_cron_row, entries), ("schedule", "last message"))
    return Answer(entries, [table, *(line for entry in entries for line in describe_problems(entry))])


def _cron_row(entry: "CronState") -> tuple[Any, ...]:
    coming, last = format_when(entry.next) or "?", format_when(entry.ticked) or "never"
    skipped = (entry.skipped["paused"], entry.skipped["overlap"])
    message = entry.last_id + (" (alive)" if entry.is_alive else "")
    return entry.name, entry.queue, entry.schedule, coming, last, entry.missed, *skipped, message


def describe_problems(entry: "CronState") -> "Iterator[str]":
    """Yield a line for the pause of a periodic job and for each of its problems."""
    if entry.pause:
        yield f"{entry.name}: {describe_pause(entry.pause, time.time())}"
    if not entry.is_served:
        forget = shell_command("delete", entry.queue, options=["--cron", entry.name], layout=entry.layout)
        yield f"{entry.name}: no worker has it: none of them runs, or it is no more in the code (`{forget}`)"
    elif entry.late > TICK_LATE_SECONDS:
        yield f"{entry.name}: its tick is {format_duration(entry.late)} late: see the logs of its workers"
    if entry.next is None:
        yield f"{entry.name}: its schedule cannot be read here"


@cron.command()
@command
def run(
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The entry's name, as `cron list` prints it.")],
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Have a worker publish the message of an entry immediately, in its pause too; its ticks go on as they are.

    Example: reliq cron run reports daily-report

    Exit codes: 0 published, 1 Redis did not answer, 2 there is no such entry, or no worker that has it.
    """
    id = admin.run_cron(queue, name)
    return Answer({"id": id, "queue": queue}, [f"published {id} to {queue}"])


# ---- keys, limits and shards ------------------------------------------------


def _weight(text: str) -> tuple[str, int]:
    """Return the key and the weight of a text such as `vip=4`; raise ConfigurationError for another form."""
    match = re.fullmatch("(.+)=([0-9]{1,9})", text, re.DOTALL)
    if match is None:
        raise ConfigurationError(f"a weight is written KEY=N, such as vip=4, not {text[:80]!r}")
    return match[1], int(match[2])


@command
def limits(
    queue: QueueName,
    *,
    ordered: Annotated[bool, typer.Option("--ordered", help="One message of a key at a time, in order.")] = False,
    per_key: Annotated[int | None, typer.Option(help="At most this many messages of a key at once.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="Starts in all: 100/s, 5/m, 1000/h.")] = None,
    burst: Annotated[int | None, typer.Option(help="Starts at once after a pause.")] = None,
    key_rate: Annotated[str | None, typer.Option(metavar="N/s", help="Starts of each key.")] = None,
    key_burst: Annotated[int | None, typer.Option(help="Starts of each key at once after a pause.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="At most this many messages at once in all.")] = None,
    weight: Annotated[
        list[Any] | None,
        parsed(_weight, "N turns of KEY for one turn of other keys; may be given again.", metavar="KEY=N"),
    ] = None,
    clear: Annotated[list[str] | None, choice(LIMITS, "Remove this limit, or weight:KEY; may be given again: ")] = None,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the limits of a queue, or change them while it is in use: order, places, rates and weights of keys.

    Example: reliq limits mail --per-key 4 --rate 100/s --weight vip=4

    A change holds within a second, for 100,000 sleeping keys within seconds, and until a worker starts whose code
    declares other limits than the worker before it.
    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue, a limit that is not allowed, or a queue that can
    have none.
    """
    options = {
        "ordered": ordered or None,
        "per_key": per_key,
        "rate": rate,
        "burst": burst,
        "key_rate": key_rate,
        "key_burst": key_burst,
        "concurrency": concurrency,
        "key_weights": dict(weight) if weight else None,
    }
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    names = {name: name.replace("-", "_") for name in LIMITS} | {"weights": "key_weights"}
    cleared = [names.get(name, name) for name in clear or ()]
    in_force = admin.set_limits(queue, clear=cleared, **changes) if changes or clear else admin.limits(queue)
    shown = [(name, getattr(in_force, field) or None) for name, field in names.items() if name != "weights"]
    shown += [("weight", f"{key}={number}") for key, number in in_force.key_weights.items()]
    return Answer(in_force, facts(shown) or [f"{queue} has no limits"])


@command
def keys(
    queue: QueueName,
    *,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only this key.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many keys, up to 200.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Every key, in no order.")] = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show which keys have messages that wait or run, those with most first, and why they wait.

    Example: reliq keys mail

    A key waits in turn for a worker, asleep for its rate or as a handler asked, paused for `reliq resume --key`, or
    saturated until a message that has a place ends. Of a queue with very many keys it shows the keys with a share of the
    waiting messages; --all shows every key. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong key.
    """
    if every and key is not None:
        raise ConfigurationError("say --key or --all, not both")
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
        f"{pluralize(view.in_turn, 'key')} in turn, {view.asleep:,} asleep"
    )
    if view.asleep_until is not None:
        lines.append(f"{_describe_sleep(queue, view.asleep_until)}.")
    elif view.is_full:
        see = shell_command("limits", queue)
        lines.append(f"None may start now: the rate or concurrency of {queue} is used up; see `{see}`.")
    return Answer(view, lines)


def _key_row(row: "KeyQueue") -> tuple[Any, ...]:
    return PRIORITY_NAMES.get(row.key, row.key), row.waiting, row.in_flight, f"{row.weight:g}", describe_wait(row)


@command
def shards(
    queue: QueueName,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", help="The new number, a power of two.")] = None,
    *,
    finish: Annotated[bool, typer.Option("--finish", help="Finish a change now, as workers do.")] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the shards of a queue, or change how many there are while it is in use.

    A change begins immediately. Workers move messages to their new shards and finish the change; with --finish this command
    does so now. Until then publishers ask twice for ids of their own, and no other change can begin.

    Example: reliq shards orders 16 --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or a wrong number, 3 not finished.
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
        change = f"; {view.map.state}, there were {view.map.was}: workers end it, and `{finish_command}` does"
    lines = [
        Table(("shard", *states), rows),
        f"{queue} has {pluralize(view.map.n, 'shard')} (epoch {view.map.epoch}){change}",
        *([f"{queue} is {format_missing(view.away)}"] if view.away else []),
        *([f"not finished: {pluralize(left, 'message')} that workers have or are about to have"] if left else []),
    ]
    value = {"map": view.map, "counts": view.counts, "away": view.away, "left": left}
    return Answer(value, lines, EXIT_UNFINISHED if left else 0)


# ---- workers ----------------------------------------------------------------


@command
def workers(
    queues: QueueNames = None,
    running: Annotated[bool, typer.Option("--running", help="Show running handlers, longest first.")] = False,
    longer_than: Annotated[
        float | None, time_span("With --running: only handlers that have run longer, for example 10m.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --running: show stacks; waits up to 10 s.")] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show every worker process that is alive: its host, queues and busy slots.

    Workers report every 5 s; a process that is killed is shown for up to 15 s more. Of each process at most 200 handlers
    are shown, and no message that `Queue.receive` holds. A stack has files, lines and functions, and no values. Exit codes:
    0 done (also when there is none), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq workers orders --running --longer-than 10m
    """
    if running:
        return _running(admin, queues or [], longer_than or 0, stacks=stacks)
    if stacks or longer_than is not None:
        raise ConfigurationError("--stacks and --longer-than go with --running")
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
    """Return the running handlers, with their stacks."""
    rows = []
    for name in queues or {name for worker in admin.workers() for name in worker.queues}:
        # Without names of the user: a worker may have a queue of another layout, or without a message so far.
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
            missing = "no answer: a handler holds the interpreter of this process, or its reliq is older"
        lines += ["", f"{row.id} in {row.host}:{row.pid}", *(f"  {line}" for line in frames or [missing])]
    return Answer(value, [*lines, *_age_of(row.seen for row in rows)])


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> "Sequence[str] | None":
    """Return the stack of a handler; None when its worker reported nothing, empty when the handler has ended meanwhile."""
    if row.worker not in reports:
        return None
    stacks = reports[row.worker].stacks
    return next((stack.frames for stack in stacks if (stack.queue, stack.id) == (row.queue, row.id)), ())
