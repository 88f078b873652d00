"""Commands on queues: `queues`, `ends`, `account`, `pause`, `resume`, `forget`, `running` and `workers`."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

import typer

from reliq.admin.filters import Filter, duration
from reliq.admin.screens import account as account_of, format_missing, format_number, format_rate
from reliq.cli.options import (
    AdminOption,
    Json,
    QueueName,
    Shard,
    Url,
    WholeQueueAdmin,
    Yes,
    open_admin,
    queue_names,
)
from reliq.cli.output import complain, confirm, print_json, print_table, say, say_age
from reliq.errors import ConfigurationError
from reliq.message import Pause
from reliq.settings import check_int, seconds
from reliq.text import format_duration, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin import Entry, MessageEvent, QueueSnapshot, Running, StackReport
    from reliq.admin.filters import EndKind


COUNT_COLUMNS = ("ready", "pending", "leased", "backoff", "retry", "garbage", "dead")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")
#: One list has at most this many ends.
ENDS_LIMIT = 100_000
#: Exit code of `forget` when a queue was refused.
EXIT_REFUSED = 2
#: Exit code of `account` when it does not add up.
EXIT_UNBALANCED = 1
#: `running --stacks` waits this long for the stacks: workers read the request at most 5 s after it.
STACK_SECONDS = 10.0


def ends(
    queue: QueueName,
    *,
    kind: Annotated[
        str | None, typer.Option(help="Only dead, expired, cancelled, purged, or acked (where history is kept).")
    ] = None,
    limit: Annotated[int, typer.Option(help="The most to show.")] = 100,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Show how the last messages ended that were not acked, newest first, each with its time, reason and error.

    The last 1,000 are remembered; of acked ones as many as `Queue(history=...)` says. Exit codes: 0 done (also when
    there is none), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq ends orders --kind expired --limit 20
    """
    most = check_int("limit", limit, least=1, most=ENDS_LIMIT)
    where = Filter(kind=cast("EndKind", kind or ""))
    finished = list(islice(admin.messages(queue, "ended", where), most))
    if json:
        names = ("id", "mark", "when", "attempt", "reason", "error", "took", "letter")
        print_json([{name: getattr(end, name) for name in names} for end in finished])
    elif not finished:
        say("None is remembered." + (" (Queue(history=...) keeps acked ones.)" if kind == "acked" else ""))
    else:
        rows = [(format_time(end.when or 0), end.mark, end.id, describe_end(end)) for end in finished]
        print_table(("when", "end", "id", "why"), rows, long=("why",))


def format_time(at: float) -> str:
    """Return a time as a person reads it, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def describe_end(end: "Entry | MessageEvent") -> str:
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


def queues(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Only these.", autocompletion=queue_names)
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also find queues that are in no registry, by a walk over all keys.")
    ] = False,
    interval: Annotated[
        str, typer.Option(help="Wait so long and count rates in it, for example 500ms; else of the last minute.")
    ] = "0",
    json: Json = False,
    url: Url = None,
    shard: Shard = None,
) -> None:
    """
    Show every queue: its messages by state, how late the first one is, how fast it moves, who works on it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq queues orders mails
    """
    overview = open_admin(url, shard=shard).queues(names or (), scan=scan, interval=duration(interval))
    views = overview.queues
    if json:
        print_json({"queues": views, "unreadable": overview.unreadable, "left_out": overview.left_out})
        return
    if views:
        _print_queues(views)
    elif not overview.unreadable:
        say("There is no queue in the registry; --scan looks for others.")
    for view in views:
        if view.pause is not None:
            say(f"{view.queue} is {describe_pause(view.pause, time.time())}")
        if view.away:
            say(f"{view.queue} is {format_missing(view.away)}")
        if view.lines and view.lines.asleep_until:
            say(describe_sleep(view.queue, view.lines.asleep_until))
    if overview.workers is None:
        say("The workers are unknown: the Redis of their registry is away.")
    for name, error in overview.unreadable.items():
        say(f"{name} cannot be read: {error}")
    if overview.left_out:
        say(
            f"The registry has {overview.left_out} more, which are not shown: name them, such as `reliq queues orders`; "
            f"`reliq forget` removes those that are no more."
        )


def _print_queues(views: "Sequence[QueueSnapshot]") -> None:
    """Print a row for each queue; columns that say something of few queues are left out when they say it of none."""
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
    print_table([*columns, *more], rows)


def describe_pause(pause: Pause, now: float) -> str:
    """Return who paused a queue, when, why and until when."""
    text = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        text += f" {format_duration(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        text += f", for {format_duration(max(0.0, pause.until - now))} more"
    return text + (f": {pause.reason}" if pause.reason else "")


def pause(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key: it sleeps.")] = "",
    reason: Annotated[str, typer.Option(help="Why; shown by `queues` and `watch`.")] = "",
    for_: Annotated[str | None, typer.Option("--for", metavar="TIME", help="Until it resumes by itself: 30m.")] = None,
    json: Json = False,
    *,
    admin: AdminOption,
) -> None:
    """
    Have consumers stop claiming within a second; running handlers finish, and publishing goes on.

    Example: reliq pause orders --reason 'the gateway is away' --for 30m

    With --key it is one key whose messages do not start: reliq pause mail --key tenant-7 --for 10m. Exit codes: 0 done,
    1 Redis did not answer, 2 an unknown queue or a wrong option.
    """
    lasts = None if for_ is None else seconds("--for", duration(for_), least=0.001)
    if key:
        if reason:
            raise ConfigurationError("a reason is kept of a queue's pause alone; leave --reason or --key out")
        admin.pause_key(queue, key, for_=lasts)
        subject = f"key {key} of {queue}"
        resume_command = shell_command("resume", queue, options=["--key", key])
    else:
        admin.pause(queue, reason=reason, for_=lasts)
        subject = queue
        resume_command = shell_command("resume", queue, layout=admin.redis_keys(queue).layout)
    if json:
        print_json(admin.key(queue, key) if key else admin.paused(queue))
    else:
        say(f"{subject} is paused" + (f" for {for_}" if for_ else f"; `{resume_command}` ends it"))


def resume(
    queue: QueueName,
    *,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only this key: it sleeps no more.")] = "",
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Have consumers claim a paused queue again.

    Example: reliq resume orders

    With --key it is one key that sleeps no more, paused or not. Exit codes: 0 it is claimed, also when it was not paused;
    1 Redis did not answer; 2 an unknown queue or a wrong key.
    """
    subject = f"key {key} of {queue}" if key else queue
    was_paused = admin.resume_key(queue, key) if key else admin.resume(queue)
    if json:
        print_json({"was_paused": was_paused})
    else:
        say(f"{subject} is resumed" if was_paused else f"{subject} was not paused")


def forget(
    queues: Annotated[
        list[str], typer.Argument(metavar="QUEUE", help="Queues that are no more.", autocompletion=queue_names)
    ],
    *,
    letters: Annotated[bool, typer.Option("--letters", help="Their dead letters go too.")] = False,
    yes: Yes = False,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Remove queues with nothing in them: their names from the registry, their totals and ends.

    Refused is a queue that has messages, has dead letters (without --letters), is served by a worker, or was in use
    within the last minute; the others go. One that is published to again is registered again.

    Example: reliq forget orders-old --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or one in use.
    """
    confirm(f"Forget {', '.join(queues)}?", yes=yes)
    deleted: dict[str, int] = {}  # queue -> its dead letters
    refused = False
    for queue in queues:
        try:
            deleted[queue] = admin.forget(queue, letters=letters)
        except ConfigurationError as error:
            complain(error)
            refused = True
    if json:
        print_json({"forgotten": list(deleted), "letters": sum(deleted.values())})
    else:
        for queue, count in deleted.items():
            say(f"{queue} is forgotten" + (f", with {pluralize(count, 'dead letter')}" if count else ""))
    if refused:
        raise typer.Exit(EXIT_REFUSED)


def account(queue: QueueName, *, json: Json = False, admin: AdminOption) -> None:
    """
    Show what came in, how it ended and what is alive, as Redis itself counts; say what does not add up.

    In a layout of the Go original, whose programs count nothing, it is what reliq did, and need not add up.

    Exit codes: 0 it adds up or need not, 1 it does not (or Redis is away or refuses), 2 wrong usage or an
    unknown queue.

    Example: reliq account orders
    """
    counts = admin.account(queue)
    layout = str(admin.redis_keys(queue).layout)
    numbers = account_of(counts, layout)
    if json:
        balanced = None if numbers["missing"] is None else numbers["missing"] == 0
        print_json({"queue": queue, "layout": layout, **numbers, "balanced": balanced, "away": counts.away})
    else:
        say(*_describe_account(numbers))
        if counts.away:
            say(f"The account is {format_missing(counts.away)}.")
    if numbers["missing"]:
        raise typer.Exit(EXIT_UNBALANCED)


def _describe_account(numbers: "Mapping[str, int | None]") -> list[str]:
    shown = {kind: number for kind, number in numbers.items() if kind != "missing" and number is not None}
    missing = numbers["missing"]
    width = len(f"{max(shown.values()):,}")
    lines = [f"{kind:>10} {number:>{width},}" for kind, number in shown.items()]
    lines.insert(2, " " * 11 + "=")  # before it the messages that came in
    if missing is None:
        lines += [
            "Above `alive` is what reliq itself did. A program in Go that shares the queue counts nothing:",
            "what it published, acked or deleted nobody knows, so that this need not add up.",
        ]
    elif missing == 0:
        lines.append("It adds up.")
    elif missing > 0:
        lines += [
            f"It does not add up: what came in is {missing:,} more than what has ended or is alive.",
            "Something else than reliq took them out, such as a deleted key, or a lost write.",
        ]
    else:
        lines += [
            f"It does not add up: what has ended or is alive is {-missing:,} more than what came in.",
            "Something else than reliq put them in, such as a script of yours, or the totals were lost.",
        ]
    return lines


def running(
    queue: QueueName,
    longer_than: Annotated[str, typer.Option(help="Only handlers that have run longer, such as 10m.")] = "0s",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also ask their workers where each stands, for 10 s.")
    ] = False,
    json: Json = False,
    *,
    admin: AdminOption,
) -> None:
    """
    Show the handlers that run, the longest running first, as their workers say every 5 s.

    Of each process at most 200 are shown, and none of what `Queue.receive` holds. A stack has files, lines and
    functions, and no values; a process whose interpreter is held tells none. Exit codes: 0 done (also when
    nothing runs), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq running orders --longer-than 10m
    """
    rows = admin.running(queue, longer_than=duration(longer_than))
    reports = admin.stacks({row.worker for row in rows}, for_seconds=STACK_SECONDS) if stacks else {}
    if json:
        print_json([asdict(row) | {"stack": _frames(reports, row)} for row in rows] if stacks else rows)
        return
    if not rows:
        say("Nothing runs." if longer_than == "0s" else f"Nothing runs for {longer_than}.")
        if admin.redis_keys(queue).bare:
            say("What programs in Go run, nobody tells.")
        return
    print_table(
        ("id", "attempt", "for", "host", "pid", "worker"),
        [(row.id, row.attempt, format_duration(row.seconds), row.host, row.pid, row.worker) for row in rows],
    )
    for row in rows if stacks else ():
        frames = _frames(reports, row)
        missing = "has ended meanwhile"
        if frames is None:
            missing = "no answer: a handler holds the interpreter of this process, or its reliq is older"
        say("", f"{row.id} in {row.host}:{row.pid}", *(f"  {line}" for line in frames or [missing]))
    say_age(row.seen for row in rows)


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> "Sequence[str] | None":
    """Return the stack of a handler; None when its worker reported nothing, empty when the handler has ended meanwhile."""
    if row.worker not in reports:
        return None
    stacks = reports[row.worker].stacks
    return next((stack.frames for stack in stacks if (stack.queue, stack.id) == (row.queue, row.id)), ())


def workers(json: Json = False, url: Url = None) -> None:
    """
    Show every worker process that is alive: where it runs, what it claims, how busy it is.

    A process that is killed is shown for up to 15 s more. Exit codes: 0 done (also when there is none), 1 Redis is
    away or refuses, 2 wrong usage.

    Example: reliq workers --json
    """
    alive = open_admin(url).workers()
    if json:
        print_json(alive)
        return
    if not alive:
        say("No worker is alive.")
        return
    now = time.time()
    rows = []
    for worker in alive:
        busy = f"{worker.busy}/{worker.slots}"
        up = format_duration(max(0.0, now - worker.started))
        last_claim = f"{format_duration(max(0.0, now - worker.last_claim))} ago"
        queues = " ".join(worker.queues)
        rows.append((worker.id, worker.host, worker.pid, worker.version, busy, up, last_claim, queues))
    print_table(("worker", "host", "pid", "version", "busy", "up", "last claim", "queues"), rows, long=("queues",))
    say_age(worker.seen for worker in alive)
