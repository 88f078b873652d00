"""`reliq pause` and `reliq resume`."""

from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import DEFAULT_LAYOUT, Desk, Json, LayoutText, QueueName, Shard, Url, admin
from reliq.cli.output import print_json, say
from reliq.errors import ConfigurationError
from reliq.settings import seconds
from reliq.text import typed

if TYPE_CHECKING:
    from reliq.admin import Admin


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
    desk, lasts = admin(url, layout, shard), None if for_ is None else seconds("--for", duration(for_), least=0.001)
    if key:
        _pause_key(desk, queue, key, reason, for_, lasts, json=json)
        return
    desk.pause(queue, reason=reason, for_=lasts)
    if json:
        print_json(desk.paused(queue))
    else:
        say(f"{queue} is paused" + (f" for {for_}" if for_ else f"; `{typed('resume', queue, layout=layout)}` ends it"))


def resume(
    queue: QueueName,
    *,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Only this key: it sleeps no more.")] = "",
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Have consumers claim a paused queue again.

    Example: reliq resume orders

    With --key it is one key that sleeps no more, paused or not. Exit codes: 0 it is claimed, also when it was not paused;
    1 Redis did not answer; 2 an unknown queue or a wrong key.
    """
    what = f"key {key} of {queue}" if key else queue
    was_paused = desk.resume_key(queue, key) if key else desk.resume(queue)
    if json:
        print_json({"was_paused": was_paused})
    else:
        say(f"{what} is resumed" if was_paused else f"{what} was not paused")


def _pause_key(
    desk: "Admin", queue: str, key: str, reason: str, for_: str | None, lasts: float | None, *, json: bool
) -> None:
    """Have one key sleep; raise ConfigurationError for a reason, which nobody would be shown."""
    if reason:
        raise ConfigurationError("a reason is kept of a queue's pause alone; leave --reason or --key out")
    desk.pause_key(queue, key, for_=lasts)
    if json:
        print_json(desk.key(queue, key))
    else:
        ends = f" for {for_}" if for_ else f"; `{typed('resume', queue, options=['--key', key])}` ends it"
        say(f"key {key} of {queue} is paused{ends}")
