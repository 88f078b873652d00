"""Commands on the keys of a queue: `limits`, `keys` and `shards`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.admin.screens import format_missing
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import QueueName, WholeQueueAdmin, Yes, words
from reliq.cli.output import EXIT_UNFINISHED, confirm, facts
from reliq.cli.queues import describe_sleep, format_time
from reliq.errors import ConfigurationError
from reliq.message import PRIORITY_LINES
from reliq.text import pluralize, shell_command

if TYPE_CHECKING:
    from reliq.admin import KeyQueue
    from reliq.settings import Limits


CLEARABLE = ("ordered", "per-key", "rate", "burst", "key-rate", "key-burst", "concurrency", "weights")


@command
def limits(
    queue: QueueName,
    *,
    ordered: Annotated[bool, typer.Option("--ordered", help="One message of a key at a time, in order.")] = False,
    no_ordered: Annotated[bool, typer.Option("--no-ordered", help="Several of a key at a time, in any order.")] = False,
    per_key: Annotated[int | None, typer.Option(help="So many messages of a key at once, over all processes.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="So many starts in all: 100/s, 5/m, 1000/h.")] = None,
    burst: Annotated[int | None, typer.Option(help="So many of them at once after a pause.")] = None,
    key_rate: Annotated[str | None, typer.Option(metavar="N/s", help="So many starts of each key.")] = None,
    key_burst: Annotated[int | None, typer.Option(help="So many of them at once after a pause.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="So many messages at once, over all processes.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="KEY=N", help="N turns of KEY for one of others; may be given again.")
    ] = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Have no such limit: {', '.join(CLEARABLE)}, weight:KEY; may be given again.",
            autocompletion=words(CLEARABLE),
        ),
    ] = None,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the limits of a queue, or change them while it is in use: order, places, rates and weights of keys.

    Example: reliq limits mail --per-key 4 --rate 100/s --weight vip=4

    A change holds within a second, for 100,000 sleeping keys within seconds, and until a worker starts whose code
    declares other limits than the one before it.
    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue, a limit that is not allowed, or a queue that can
    have none.
    """
    if ordered and no_ordered:
        raise ConfigurationError("say --ordered or --no-ordered, not both")
    order = True if ordered else False if no_ordered else None
    weights = _parse_weights(weight or ())
    options = {
        "ordered": order,
        "per_key": per_key,
        "rate": rate,
        "burst": burst,
        "key_rate": key_rate,
        "key_burst": key_burst,
        "concurrency": concurrency,
        "key_weights": weights,
    }
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if not changes and clear is None:
        in_force = admin.limits(queue)
    else:
        cleared = [
            name if name.startswith("weight:") else {"weights": "key_weights"}.get(name, name.replace("-", "_"))
            for name in clear or ()
        ]
        in_force = admin.set_limits(queue, clear=cleared, **changes)
    return Answer(in_force, facts(_describe_limits(in_force)) or [f"{queue} has no limits"])


def _parse_weights(texts: Sequence[str]) -> dict[str, int] | None:
    """Return `KEY=N` texts as weights; raise ConfigurationError for another form."""
    weights = {}
    for text in texts:
        key, _, number = text.rpartition("=")
        if not key or not (number.isascii() and number.isdecimal() and len(number) < 10):  # noqa: PLR2004
            raise ConfigurationError(f"a weight is written KEY=N, such as vip=4, not {text[:80]!r}")
        weights[key] = int(number)
    return weights or None


def _describe_limits(limits: "Limits") -> list[tuple[str, str]]:
    """Return the names and values of the limits that there are."""
    facts = [("ordered", "one message of a key at a time")] if limits.ordered else []
    facts += [("per key", f"{limits.per_key:,} at once")] if limits.per_key is not None else []
    for name, rate, burst in (("rate", limits.rate, limits.burst), ("key rate", limits.key_rate, limits.key_burst)):
        facts += [(name, f"{rate}, {burst:,} at once after a pause" if burst else rate)] if rate is not None else []
    facts += [("concurrency", f"{limits.concurrency:,} at once in all")] if limits.concurrency is not None else []
    return facts + [("weight", f"{key}: {number}") for key, number in limits.key_weights.items()]


KEY_COLUMNS = ("key", "waiting", "in flight", "weight", "why it waits")
#: How a person calls the lines that stand for priorities.
PRIORITY_NAMES = {line: f"(priority {priority})" for priority, line in PRIORITY_LINES.items()}


@command
def keys(
    queue: QueueName,
    *,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="This key alone.")] = None,
    limit: Annotated[int, typer.Option(help="The most to show, up to 200.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Every key, in no order.")] = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show which keys have messages that wait or run, those with most first, and why they wait.

    Example: reliq keys mail

    A key waits in turn for a worker, asleep for its rate or as a handler asked, paused for `reliq resume --key`, or
    saturated until a message that has a place ends. Of a queue of very many keys those with a share of what waits are
    shown; --all walks over every key. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong key.
    """
    if every and key is not None:
        raise ConfigurationError("say --key or --all, not both")
    if every:
        rows = list(admin.each_key(queue))
        return Answer(rows, ("  ".join(str(cell) for cell in _row(row) if cell != "") for row in rows))
    if key is not None:
        row = admin.key(queue, key)
        return Answer(row, [Table(KEY_COLUMNS, [_row(row)], ("key",))])
    view = admin.keys(queue, limit=limit)
    lines: list[object] = [Table(KEY_COLUMNS, [_row(row) for row in view.largest], ("key",))] if view.largest else []
    lines.append(
        f"{view.waiting:,} waiting, {view.running:,} running; "
        f"{pluralize(view.in_turn, 'key')} in turn, {view.asleep:,} asleep"
    )
    if view.asleep_until is not None:
        lines.append(f"{describe_sleep(queue, view.asleep_until)}.")
    elif view.is_full:
        see = shell_command("limits", queue)
        lines.append(f"None may start now: the rate or concurrency of {queue} is used up; see `{see}`.")
    return Answer(view, lines)


def _row(key_queue: "KeyQueue") -> tuple[Any, ...]:
    name = PRIORITY_NAMES.get(key_queue.key, key_queue.key)
    weight = f"{key_queue.weight:g}"
    return name, key_queue.waiting, key_queue.in_flight, weight, describe_wait(key_queue)


def describe_wait(line: "KeyQueue") -> str:
    """Return what the messages of a key wait for."""
    if line.state == "asleep" and line.asleep_until is not None:
        return f"asleep until {format_time(line.asleep_until)} UTC"
    return {
        "in turn": "in turn for a worker",
        "paused": "paused until `reliq resume --key`",
        "saturated": "saturated: all its places are taken",
        "standing": "standing for no reason: `reliq check --repair` mends it",
    }.get(line.state, "")


@command
def shards(
    queue: QueueName,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", help="Have so many: a power of two.")] = None,
    *,
    finish: Annotated[bool, typer.Option("--finish", help="End a change at once: workers do it too.")] = False,
    yes: Yes = False,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Show the shards of a queue, or change how many there are while it is in use.

    A change begins at once. Workers move what lies where only the earlier number looks for it, and finish the change; with
    --finish that is done now. Until then publishers ask twice for ids of their own, and no other change can begin.

    Example: reliq shards orders 16 --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or a wrong number, 3 not finished.
    """
    if number is not None:
        confirm(f"Have {number} shards of {queue}? Every publisher must be of a version that knows of shards.", yes=yes)
        admin.resize(queue, number)
    left = admin.finish_resize(queue) if finish else 0
    view = admin.shards(queue)
    rows = [
        (at, counts.pending, counts.ready, counts.unack, counts.retry, counts.dead) if counts else (at, *"?????")
        for at, counts in enumerate(view.counts)
    ]
    change = ""
    if view.map.was != view.map.n:
        finish_command = shell_command("shards", queue, options=["--finish"])
        change = f"; {view.map.state}, there were {view.map.was}: workers end it, and `{finish_command}` does"
    lines = [
        Table(("shard", "pending", "ready", "unack", "retry", "dead"), rows),
        f"{queue} has {pluralize(view.map.n, 'shard')} (epoch {view.map.epoch}){change}",
        *([f"{queue} is {format_missing(view.away)}"] if view.away else []),
        *([f"not finished: {pluralize(left, 'message')} that workers have or are about to have"] if left else []),
    ]
    value = {"map": view.map, "counts": view.counts, "away": view.away, "left": left}
    return Answer(value, lines, EXIT_UNFINISHED if left else 0)
