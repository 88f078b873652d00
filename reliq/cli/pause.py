"""`reliq pause` and `reliq resume`."""

import shlex
from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Shard, Url, admin
from reliq.cli.output import print_json, say
from reliq.settings import seconds


def pause(
    queue: QueueName,
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

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong option.
    """
    desk = admin(url, layout, shard)
    desk.pause(queue, reason=reason, for_=None if for_ is None else seconds("--for", duration(for_), least=0.001))
    if json:
        print_json(desk.paused(queue))
    else:
        say(f"{queue} is paused" + (f" for {for_}" if for_ else f"; `reliq resume {_words(queue, layout)}` ends it"))


def resume(
    queue: QueueName, json: Json = False, url: Url = None, layout: LayoutText = DEFAULT_LAYOUT, shard: Shard = None
) -> None:
    """
    Have consumers claim a paused queue again.

    Example: reliq resume orders

    Exit codes: 0 it is claimed, also when it was not paused; 1 Redis did not answer; 2 an unknown queue.
    """
    was_paused = admin(url, layout, shard).resume(queue)
    if json:
        print_json({"was_paused": was_paused})
    else:
        say(f"{queue} is resumed" if was_paused else f"{queue} was not paused")


def _words(queue: str, layout: str) -> str:
    """Return the words that name a queue to a command, as a shell takes them."""
    return shlex.join([queue] if layout == DEFAULT_LAYOUT else [queue, "--layout", layout])
