"""`reliq ends`: how the last messages of a queue ended."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import (
    DEFAULT_LAYOUT,
    AdminOption,
    Json,
    LayoutText,
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
from reliq.keys import Layout
from reliq.message import Pause
from reliq.settings import seconds
from reliq.text import format_duration, format_missing, format_number, format_rate, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.admin import Account, Admin, FinishedMessage, Overview, QueueView, Running, StackReport


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
    found = admin.ends(queue, kind=kind, limit=limit)
    if json:
        print_json(found)
    elif not found:
        say("None is remembered." + (" (Queue(history=...) keeps acked ones.)" if kind == "acked" else ""))
    else:
        rows = [(format_time(end.at), end.kind, end.id, describe_end(end)) for end in found]
        print_table(("when", "end", "id", "why"), rows, long=("why",))


def format_time(at: float) -> str:
    """Return a time as a person reads it, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def describe_end(end: "FinishedMessage") -> str:
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


QUEUE_COLUMNS = ("queue", "late", "ready", "pending", "leased", "backoff", "retry", "garbage", "dead")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")


def queues(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Only these.", autocompletion=queue_names)
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also find queues that are in no registry, by a walk over all keys.")
    ] = False,
    interval: Annotated[str, typer.Option(help="The time over which rates are counted; 0 for none.")] = "500ms",
    json: Json = False,
    url: Url = None,
    shard: Shard = None,
) -> None:
    """
    Show every queue: its messages by state, how late the first one is, how fast it moves, who works on it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq queues orders mails
    """
    seen = open_admin(url, shard=shard).queues(names or (), scan=scan, interval=duration(interval))
    if json:
        print_json({"queues": seen.queues, "unreadable": seen.unreadable, "left_out": seen.left_out})
        return
    _print(seen)


def _print(seen: "Overview") -> None:
    """Print a table of the queues, then what there is to say besides."""
    if not seen.queues and not seen.unreadable:
        say("There is no queue in the registry; --scan looks for others.")
    elif seen.queues:
        _print_table(seen.queues)
    for view in seen.queues:
        if view.pause is not None:
            say(f"{view.queue} is {describe_pause(view.pause, time.time())}")
        if view.away:
            say(f"{view.queue} is {format_missing(view.away)}")
        if view.lines and view.lines.asleep_until:
            say(describe_sleep(view.queue, view.lines.asleep_until))
    if seen.workers is None:
        say("The workers are unknown: the Redis of their registry is away.")
    for name, why in seen.unreadable.items():
        say(f"{name} cannot be read: {why}")
    if seen.left_out:
        say(
            f"The registry has {seen.left_out} more, which are not shown: name them, such as `reliq queues orders`; "
            f"`reliq forget` removes those that are no more."
        )


def _print_table(views: "Sequence[QueueView]") -> None:
    """Print a row for each queue; columns that say something of few queues are left out when they say it of none."""
    rated = any(view.rates is not None for view in views)
    due = {
        "waiting": any(view.lines for view in views),
        "shards": any(view.shards > 1 for view in views),
        "layout": any(view.layout != "reliq" for view in views),
    }
    more = [name for name, is_due in due.items() if is_due]
    columns = (*QUEUE_COLUMNS, *(RATE_COLUMNS if rated else ()), "workers", *more)
    print_table(columns, [(*_row(view, rated=rated), *(getattr(view, name) for name in more)) for view in views])


def describe_pause(pause: Pause, now: float) -> str:
    """Return who paused a queue, when, why and until when."""
    said = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        said += f" {format_duration(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        said += f", for {format_duration(max(0.0, pause.until - now))} more"
    return said + (f": {pause.reason}" if pause.reason else "")


def _row(view: "QueueView", *, rated: bool) -> list[str]:
    late = "-" if view.late is None else format_duration(view.late)
    counts = (view.ready, view.pending, view.unack - view.backoff, view.backoff, view.retry, view.garbage, view.dead)
    cells = [view.queue, late, *map(format_number, counts)]
    if rated:
        rates = view.rates
        cells += (
            [format_rate(rates.arrived), format_rate(rates.acked), format_rate(rates.failed)] if rates else ["", "", ""]
        )
    return [*cells, "?" if view.workers is None else str(view.workers)]


def pause(
    queue: QueueName,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key: it sleeps.")] = "",
    reason: Annotated[str, typer.Option(help="Why; shown by `queues` and `watch`.")] = "",
    for_: Annotated[str | None, typer.Option("--for", metavar="TIME", help="Until it resumes by itself: 30m.")] = None,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
    shard: Shard = None,
) -> None:
    """
    Have consumers stop claiming within a second; running handlers finish, and publishing goes on.

    Example: reliq pause orders --reason 'the gateway is away' --for 30m

    With --key it is one key whose messages do not start: reliq pause mail --key tenant-7 --for 10m. Exit codes: 0 done,
    1 Redis did not answer, 2 an unknown queue or a wrong option.
    """
    admin, lasts = (
        open_admin(url, layout, shard),
        None if for_ is None else seconds("--for", duration(for_), least=0.001),
    )
    if key:
        _pause_key(admin, queue, key, reason, for_, lasts, json=json)
        return
    admin.pause(queue, reason=reason, for_=lasts)
    if json:
        print_json(admin.paused(queue))
    else:
        say(
            f"{queue} is paused"
            + (f" for {for_}" if for_ else f"; `{shell_command('resume', queue, layout=layout)}` ends it")
        )


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
    what = f"key {key} of {queue}" if key else queue
    was_paused = admin.resume_key(queue, key) if key else admin.resume(queue)
    if json:
        print_json({"was_paused": was_paused})
    else:
        say(f"{what} is resumed" if was_paused else f"{what} was not paused")


def _pause_key(
    admin: "Admin", queue: str, key: str, reason: str, for_: str | None, lasts: float | None, *, json: bool
) -> None:
    """Have one key sleep; raise ConfigurationError for a reason, which nobody would be shown."""
    if reason:
        raise ConfigurationError("a reason is kept of a queue's pause alone; leave --reason or --key out")
    admin.pause_key(queue, key, for_=lasts)
    if json:
        print_json(admin.key(queue, key))
    else:
        ends = f" for {for_}" if for_ else f"; `{shell_command('resume', queue, options=['--key', key])}` ends it"
        say(f"key {key} of {queue} is paused{ends}")


EXIT_REFUSED = 2


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
    gone: dict[str, int] = {}
    refused = False
    for queue in queues:
        try:
            gone[queue] = admin.forget(queue, letters=letters)
        except ConfigurationError as error:
            complain(error)
            refused = True
    if json:
        print_json({"forgotten": list(gone), "letters": sum(gone.values())})
    else:
        say(
            *(
                f"{queue} is forgotten" + (f", with {pluralize(kept, 'dead letter')}" if kept else "")
                for queue, kept in gone.items()
            )
        )
    if refused:
        raise typer.Exit(EXIT_REFUSED)


EXIT_UNBALANCED = 1


def account(queue: QueueName, *, json: Json = False, admin: AdminOption) -> None:
    """
    Show what came in, how it ended and what is alive, as Redis itself counts; say what does not add up.

    In a layout of the Go original, whose programs count nothing, it is what reliq did, and need not add up.

    Exit codes: 0 it adds up or need not, 1 it does not (or Redis is away or refuses), 2 wrong usage or an
    unknown queue.

    Example: reliq account orders
    """
    found = admin.account(queue)
    if json:
        print_json(found)
    else:
        say(*_lines(found), *([f"The account is {format_missing(found.away)}."] if found.away else []))
    if found.balanced is False:
        raise typer.Exit(EXIT_UNBALANCED)


def _lines(found: "Account") -> list[str]:
    came = [("published", found.published), ("redriven", found.redriven)]
    went = [(kind, getattr(found, kind)) for kind in ("acked", "dead", "expired", "cancelled", "purged", "alive")]
    width = len(f"{max(number for _, number in came + went):,}")
    lines = [f"{kind:>10} {number:>{width},}" for kind, number in came]
    lines += [f"{kind:>10} {number:>{width},}" for kind, number in went]
    lines.insert(len(came), " " * 11 + "=")
    if found.missing is None:
        return [
            *lines,
            "Above `alive` is what reliq itself did. A program in Go that shares the queue counts nothing:",
            "what it published, acked or deleted nobody knows, so that this need not add up.",
        ]
    if found.missing == 0:
        return [*lines, "It adds up."]
    many = f"{abs(found.missing):,}"
    if found.missing > 0:
        return [
            *lines,
            f"It does not add up: what came in is {many} more than what has ended or is alive.",
            "Something else than reliq took them out, such as a deleted key, or a lost write.",
        ]
    return [
        *lines,
        f"It does not add up: what has ended or is alive is {many} more than what came in.",
        "Something else than reliq put them in, such as a script of yours, or the totals were lost.",
    ]


#: Workers have this long to tell their stacks: they hear of it at most 5 s after the question.
STACK_SECONDS = 10.0
#: A handler without a stack has ended, or its process does not answer.
_NO_STACK = ("has ended meanwhile", "no answer: a handler holds the interpreter of this process, or its reliq is older")


def running(
    queue: QueueName,
    longer_than: Annotated[str, typer.Option(help="Only handlers that have run longer, such as 10m.")] = "0s",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also ask their workers where each stands, for 10 s.")
    ] = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
    shard: Shard = None,
) -> None:
    """
    Show the handlers that run, the longest running first, as their workers say every 5 s.

    Of each process at most 200 are shown, and none of what `Queue.receive` holds. A stack has files, lines and
    functions, and no values; a process whose interpreter is held tells none. Exit codes: 0 done (also when
    nothing runs), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq running orders --longer-than 10m
    """
    operator = open_admin(url, layout, shard)
    rows = operator.running(queue, longer_than=duration(longer_than))
    reports = operator.stacks({row.worker for row in rows}, for_seconds=STACK_SECONDS) if stacks else {}
    if json:
        print_json([asdict(row) | {"stack": _frames(reports, row)} for row in rows] if stacks else rows)
        return
    if not rows:
        say("Nothing runs." if longer_than == "0s" else f"Nothing runs for {longer_than}.")
        if Layout.parse(layout).bare:
            say("What programs in Go run, nobody tells.")
        return
    print_table(
        ("id", "attempt", "for", "host", "pid", "worker"),
        [(row.id, row.attempt, format_duration(row.seconds), row.host, row.pid, row.worker) for row in rows],
    )
    if stacks:
        for row in rows:
            frames = _frames(reports, row)
            say(
                "",
                f"{row.id} in {row.host}:{row.pid}",
                *(f"  {frame}" for frame in frames or [_NO_STACK[frames is None]]),
            )
    say_age(row.seen for row in rows)


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> Sequence[str] | None:
    """Return the stack of a handler; None when its worker told nothing, empty when it has ended meanwhile."""
    if row.worker not in reports:
        return None
    found = (one.frames for one in reports[row.worker].stacks if (one.queue, one.id) == (row.queue, row.id))
    return next(found, ())


def workers(json: Json = False, url: Url = None) -> None:
    """
    Show every worker process that is alive: where it runs, what it claims, how busy it is.

    A process that is killed is shown for up to 15 s more. Exit codes: 0 done (also when there is none), 1 Redis is
    away or refuses, 2 wrong usage.

    Example: reliq workers --json
    """
    found = open_admin(url).workers()
    if json:
        print_json(found)
        return
    if not found:
        say("No worker is alive.")
        return
    now = time.time()
    print_table(
        ("worker", "host", "pid", "version", "busy", "up", "last claim", "queues"),
        [
            (
                one.id,
                one.host,
                one.pid,
                one.version,
                f"{one.busy}/{one.slots}",
                format_duration(max(0.0, now - one.started)),
                f"{format_duration(max(0.0, now - one.last_claim))} ago",
                " ".join(one.queues),
            )
            for one in found
        ],
        long=("queues",),
    )
    say_age(one.seen for one in found)
