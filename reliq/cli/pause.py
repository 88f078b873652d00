"""`reliq pause` and `reliq resume`."""

from typing import Annotated

import typer

from reliq.cli.common import Hdt3213, Json, QueueName, Url, admin, duration, print_json, say


def pause(
    queue: QueueName,
    reason: Annotated[str, typer.Option(help="Why; shown by `queues` and `watch`.")] = "",
    for_: Annotated[str | None, typer.Option("--for", metavar="TIME", help="Until it resumes by itself: 30m.")] = None,
    json: Json = False,
    url: Url = None,
    hdt3213: Hdt3213 = False,
) -> None:
    """
    Have consumers stop claiming within a second; running handlers finish, and publishing goes on.

    Example: reliq pause orders --reason 'the gateway is away' --for 30m

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong option.
    """
    desk = admin(url, hdt3213=hdt3213)
    desk.pause(queue, reason=reason, for_=None if for_ is None else duration(for_))
    if json:
        print_json(desk.paused(queue))
    else:
        say(f"{queue} is paused" + (f" for {for_}" if for_ else f"; `reliq resume {queue}` ends it"))


def resume(queue: QueueName, json: Json = False, url: Url = None, hdt3213: Hdt3213 = False) -> None:
    """
    Have consumers claim a paused queue again.

    Example: reliq resume orders

    Exit codes: 0 it is claimed, also when it was not paused; 1 Redis did not answer; 2 an unknown queue.
    """
    was_paused = admin(url, hdt3213=hdt3213).resume(queue)
    if json:
        print_json({"was_paused": was_paused})
    else:
        say(f"{queue} is resumed" if was_paused else f"{queue} was not paused")
