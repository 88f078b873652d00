"""Commands on queues: `queues`, `pause`, `resume`, `forget` and `workers`."""

import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.admin.filters import duration
from reliq.admin.screens import account, format_missing, format_number, format_rate
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import (
    AdminOption,
    QueueName,
    QueueNames,
    WholeQueueAdmin,
    Yes,
    queue_names,
)
from reliq.cli.output import age_of, confirm
from reliq.errors import ConfigurationError
from reliq.message import Pause
from reliq.settings import seconds
from reliq.text import format_duration, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin import Admin, MessageEvent, Overview, QueueSnapshot, Running, StackReport

COUNT_COLUMNS = ("ready", "pending", "leased", "backoff", "retry", "garbage", "dead")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")
#: Exit code of `forget` when a queue was refused.
EXIT_REFUSED = 2
#: Exit code of `queues --check` when an account does not add up.
EXIT_UNBALANCED = 1
#: `workers --stacks` waits this long for the stacks: workers read the request at most 5 s after it.
STACK_SECONDS = 10.0

Cron = Annotated[
    str, typer.Option("--cron", metavar="NAME", help="Only this periodic entry, as `cron list` prints it.")
]


def format_time(at: float) -> str:
    """Return a time as a person reads it, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def describe_end(end: "MessageEvent") -> str:
    """Return the reason of an end in one line, as far as it is known."""
    if end.took is not None:
        return f"after {format_duration(end.took)}"
    attempt = f" (delivery {end.attempt})" if end.attempt is not None else ""
    return f"{end.reason}{attempt}" + (f": {end.error}" if end.error else "") if end.reason else ""


def describe_sleep(queue: str, until: float) -> str:
    """Return until when a queue sleeps, why, and what wakes it."""
    return (
        f"{queue} sleeps until {format_time(until)} UTC: a handler raised RateLimited for a message without a key; "
        f"`{shell_command('resume', queue)}` wakes it"
    )


@command
def queues(
    queues: QueueNames = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also find queues that are in no registry, by a walk over all keys.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print the account of each queue instead; exit 1 when one does not add up.")
    ] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show every queue: its messages by state, the age of the oldest, its rates of the last minute, its workers.

    `reliq watch` shows the rates between two refreshes.

    With --check it is the account of each: how many messages came in, how they ended, what is alive, and whether that adds
    up. In a layout of the Go original, whose programs count nothing, it need not. Exit codes: 0 done, 1 Redis is away or
    refuses, or with --check an account does not add up; 2 wrong usage or an unknown queue.

    Example: reliq queues orders mails --check
    """
    overview = admin.queues(queues or (), scan=scan)
    accounts = [account(view, view.layout) for view in overview.queues]
    is_unbalanced = any(numbers["missing"] for numbers in accounts)
    value = {
        "queues": [
            asdict(view) | {"account": numbers} for view, numbers in zip(overview.queues, accounts, strict=True)
        ],
        "unreadable": overview.unreadable,
        "left_out": overview.left_out,
    }
    lines = _describe_accounts(overview, accounts) if check else _describe_queues(overview)
    return Answer(value, lines, EXIT_UNBALANCED if check and (is_unbalanced or overview.unreadable) else 0)


def _describe_accounts(overview: "Overview", accounts: "Sequence[Mapping[str, int | None]]") -> "Iterator[str]":
    for view, numbers in zip(overview.queues, accounts, strict=True):
        if len(accounts) > 1:
            yield f"{view.queue}:"
        yield from _describe_account(view, numbers)
    for name, error in overview.unreadable.items():
        yield f"{name} cannot be read: {error}"


def _describe_queues(overview: "Overview") -> "Iterator[object]":
    """Yield a table of the queues, then what the table cannot show."""
    views = overview.queues
    if views:
        yield _table(views)
    elif not overview.unreadable:
        yield "There is no queue in the registry; --scan looks for others."
    yield from describe_overview(overview)


def describe_overview(overview: "Overview") -> "Iterator[str]":
    """Yield a line for each pause, queue that sleeps, and Redis or queue that cannot be read."""
    for view in overview.queues:
        if view.pause is not None:
            yield f"{view.queue} is {describe_pause(view.pause, time.time())}"
        if view.away:
            yield f"{view.queue} is {format_missing(view.away)}"
        if view.lines and view.lines.asleep_until:
            yield describe_sleep(view.queue, view.lines.asleep_until)
    if overview.workers is None:
        yield "The workers are unknown: the Redis of their registry is away."
    for name, error in overview.unreadable.items():
        yield f"{name} cannot be read: {error}"
    if overview.left_out:
        yield (
            f"The registry has {overview.left_out} more, which are not shown: name them, such as `reliq queues orders`; "
            f"`reliq forget` removes those that are no more."
        )


def _table(views: "Sequence[QueueSnapshot]") -> Table:
    """Return a row for each queue; columns that say something of few queues are left out when they say it of none."""
    columns = ["queue", "late", *COUNT_COLUMNS]
    has_rates = any(view.rates is not None for view in views)
    columns += RATE_COLUMNS if has_rates else ()
    columns.append("workers")
    more = ["waiting"] if any(view.lines for view in views) else []
    more += ["shards"] if any(view.shards > 1 for view in views) else []
    more += ["layout"] if any(view.layout != "reliq" for view in views) else []
    rows = []
    for view in views:
        row = [view.queue, "-" if view.late is None else format_duration(view.late)]
        leased = view.unack - view.backoff
        counts = (view.ready, view.pending, leased, view.backoff, view.retry, view.garbage, view.dead)
        row += map(format_number, counts)
        if has_rates:
            rates = (view.rates.arrived, view.rates.acked, view.rates.failed) if view.rates else ()
            row += map(format_rate, rates) if rates else [""] * len(RATE_COLUMNS)
        row.append("?" if view.workers is None else str(view.workers))
        rows.append(row + [str(getattr(view, name)) for name in more])
    return Table([*columns, *more], rows)


def _describe_account(view: "QueueSnapshot", numbers: "Mapping[str, int | None]") -> "Iterator[str]":
    """Yield the totals of a queue, and whether all that came in has ended or is alive."""
    shown = {kind: number for kind, number in numbers.items() if kind != "missing" and number is not None}
    width = len(f"{max(shown.values()):,}")
    for kind, number in shown.items():
        yield f"{kind:>10} {number:>{width},}"
        if kind == "redriven":  # before it the messages that came in
            yield " " * 11 + "="
    missing = numbers["missing"]
    if missing is None:
        yield "Above `alive` is what reliq itself did. A program in Go that shares the queue counts nothing,"
        yield "so that this need not add up."
    elif missing == 0:
        yield "It adds up."
    elif missing > 0:
        yield f"It does not add up: what came in is {missing:,} more than what has ended or is alive."
        yield "Something else than reliq took them out, such as a deleted key, or a lost write."
    else:
        yield f"It does not add up: what has ended or is alive is {-missing:,} more than what came in."
        yield "Something else than reliq put them in, such as a script of yours, or the totals were lost."
    if view.away:
        yield f"The account is {format_missing(view.away)}."


def describe_pause(pause: Pause, now: float) -> str:
    """Return who paused a queue, when, why and until when."""
    text = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        text += f" {format_duration(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        text += f", for {format_duration(max(0.0, pause.until - now))} more"
    return text + (f": {pause.reason}" if pause.reason else "")


@command
def pause(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key: it sleeps.")] = "",
    cron: Cron = "",
    reason: Annotated[str, typer.Option(help="Why; shown by `queues`, `watch` and `cron list`.")] = "",
    for_: Annotated[str | None, typer.Option("--for", metavar="TIME", help="Until it resumes by itself: 30m.")] = None,
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
    _check_one(key, cron)
    lasts = None if for_ is None else seconds("--for", duration(for_), least=0.001)
    value: Any
    if key:
        if reason:
            raise ConfigurationError("a reason is kept of a queue's pause alone; leave --reason or --key out")
        admin.pause_key(queue, key, for_=lasts)
        value = admin.key(queue, key)
    elif cron:
        if for_:
            raise ConfigurationError("a periodic entry is paused until it is resumed; leave --for or --cron out")
        admin.pause_cron(queue, cron, reason=reason)
        value = {"paused": True, "queue": queue}
    else:
        admin.pause(queue, reason=reason, for_=lasts)
        value = admin.paused(queue)
    options = ["--key", key] if key else ["--cron", cron] if cron else []
    ending = shell_command("resume", queue, options=options, layout=admin.redis_keys(queue).layout)
    subject = _subject(queue, key, cron)
    return Answer(value, [f"{subject} is paused" + (f" for {for_}" if for_ else f"; `{ending}` ends it")])


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
    _check_one(key, cron)
    subject = _subject(queue, key, cron)
    if key:
        was_paused = admin.resume_key(queue, key)
    else:
        was_paused = admin.resume_cron(queue, cron) if cron else admin.resume(queue)
    return Answer({"was_paused": was_paused}, [f"{subject} is resumed" if was_paused else f"{subject} was not paused"])


def _check_one(key: str, cron: str) -> None:
    if key and cron:
        raise ConfigurationError("say --key or --cron, not both")


def _subject(queue: str, key: str, cron: str) -> str:
    return f"key {key} of {queue}" if key else f"{cron} of {queue}" if cron else queue


@command
def forget(
    queues: Annotated[
        list[str], typer.Argument(metavar="QUEUE", help="Queues that are no more.", autocompletion=queue_names)
    ],
    *,
    cron: Cron = "",
    letters: Annotated[bool, typer.Option("--letters", help="Their dead letters go too.")] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Remove queues with nothing in them: their names from the registry, their totals and ends.

    Refused is a queue that has messages, has dead letters (without --letters), is served by a worker, or was in use
    within the last minute; the others go. A queue that is published to again is registered again. With --cron the queues
    stay, and the state of a periodic entry goes that is no longer in the code: its last tick, counts and pause.

    Example: reliq forget orders-old --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or entry, or one in use.
    """
    subjects = [_subject(queue, "", cron) for queue in queues]
    confirm(f"Forget {', '.join(subjects)}?", yes=yes)
    deleted: dict[str, int] = {}  # subject -> its dead letters
    refused = []
    for queue, subject in zip(queues, subjects, strict=True):
        try:
            if cron:
                admin.forget_cron(queue, cron)
            deleted[subject] = 0 if cron else admin.forget(queue, letters=letters)
        except ConfigurationError as error:
            refused.append(str(error))
    lines = [
        f"{subject} is forgotten" + (f", with {pluralize(count, 'dead letter')}" if count else "")
        for subject, count in deleted.items()
    ]
    value = {"forgotten": list(deleted), "letters": sum(deleted.values())}
    return Answer(value, lines, EXIT_REFUSED if refused else 0, complaints=refused)


@command
def workers(
    queues: QueueNames = None,
    running: Annotated[
        bool, typer.Option("--running", help="Show the handlers that run in them, the longest running first.")
    ] = False,
    longer_than: Annotated[
        str, typer.Option(metavar="TIME", help="With --running: only handlers that have run longer, such as 10m.")
    ] = "0s",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="With --running: also ask for the line where each stands, for 10 s.")
    ] = False,
    *,
    admin: AdminOption,
) -> Answer:
    """
    Show every worker process that is alive: where it runs, what it claims, how busy it is.

    Workers report every 5 s; a process that is killed is shown for up to 15 s more. Of each process at most 200 handlers
    are shown, and no message that `Queue.receive` holds. A stack has files, lines and functions, and no values. Exit codes:
    0 done (also when there is none), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq workers orders --running --longer-than 10m
    """
    if running:
        return _running(admin, queues or [], longer_than, stacks=stacks)
    if stacks or longer_than != "0s":
        raise ConfigurationError("--stacks and --longer-than go with --running")
    wanted = {admin.redis_keys(name).name for name in queues or ()}
    alive = [worker for worker in admin.workers() if not wanted or wanted & set(worker.queues)]
    now = time.time()
    rows = []
    for worker in alive:
        busy = f"{worker.busy}/{worker.slots}"
        up = format_duration(max(0.0, now - worker.started))
        last_claim = f"{format_duration(max(0.0, now - worker.last_claim))} ago"
        names = " ".join(worker.queues)
        rows.append((worker.id, worker.host, worker.pid, worker.version, busy, up, last_claim, names))
    columns = ("worker", "host", "pid", "version", "busy", "up", "last claim", "queues")
    table = Table(columns, rows, ("worker", "host", "queues"))
    return Answer(alive, [table, *age_of(worker.seen for worker in alive)] if alive else ["No worker is alive."])


def _running(admin: "Admin", queues: "Sequence[str]", longer_than: str, *, stacks: bool) -> Answer:
    """Return the handlers that run, with their stacks."""
    least = duration(longer_than)
    rows = [row for name in queues for row in admin.running(name, longer_than=least)]
    if not queues:
        for name in {name for worker in admin.workers() for name in worker.queues}:
            with suppress(ConfigurationError):  # a queue of another layout, or without a message so far
                rows += admin.running(name, longer_than=least)
    rows.sort(key=lambda row: -row.seconds)
    reports = admin.stacks({row.worker for row in rows}, for_seconds=STACK_SECONDS) if stacks else {}
    value = [asdict(row) | ({"stack": _frames(reports, row)} if stacks else {}) for row in rows]
    if not rows:
        nothing = ["Nothing runs." if longer_than == "0s" else f"Nothing runs for {longer_than}."]
        is_bare = any(admin.redis_keys(name).bare for name in queues)
        return Answer(value, nothing + ["Programs in Go do not report what they run."] * is_bare)
    cells = [
        (row.queue, row.id, row.attempt, format_duration(row.seconds), row.host, row.pid, row.worker) for row in rows
    ]
    columns = ("queue", "id", "attempt", "for", "host", "pid", "worker")
    lines: list[object] = [Table(columns, cells, ("host", "worker"))]
    for row in rows if stacks else ():
        frames = _frames(reports, row)
        missing = "has ended meanwhile"
        if frames is None:
            missing = "no answer: a handler holds the interpreter of this process, or its reliq is older"
        lines += ["", f"{row.id} in {row.host}:{row.pid}", *(f"  {line}" for line in frames or [missing])]
    return Answer(value, [*lines, *age_of(row.seen for row in rows)])


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> "Sequence[str] | None":
    """Return the stack of a handler; None when its worker reported nothing, empty when the handler has ended meanwhile."""
    if row.worker not in reports:
        return None
    stacks = reports[row.worker].stacks
    return next((stack.frames for stack in stacks if (stack.queue, stack.id) == (row.queue, row.id)), ())
