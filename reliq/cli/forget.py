"""`reliq forget`: take empty queues out of Redis."""

from typing import Annotated

import typer

from reliq.cli.options import Json, WholeDesk, Yes, queue_names
from reliq.cli.output import complain, confirm, print_json, say
from reliq.errors import ConfigurationError
from reliq.text import count_of

EXIT_REFUSED = 2


def forget(
    queues: Annotated[
        list[str], typer.Argument(metavar="QUEUE", help="Queues that are no more.", autocompletion=queue_names)
    ],
    *,
    letters: Annotated[bool, typer.Option("--letters", help="Their dead letters go too.")] = False,
    yes: Yes = False,
    json: Json = False,
    desk: WholeDesk,
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
            gone[queue] = desk.forget(queue, letters=letters)
        except ConfigurationError as error:
            complain(error)
            refused = True
    if json:
        print_json({"forgotten": list(gone), "letters": sum(gone.values())})
    else:
        say(
            *(
                f"{queue} is forgotten" + (f", with {count_of(kept, 'dead letter')}" if kept else "")
                for queue, kept in gone.items()
            )
        )
    if refused:
        raise typer.Exit(EXIT_REFUSED)
