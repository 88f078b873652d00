"""`reliq publish`: one body, or a file of them."""

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from reliq.admin.filters import duration, headers_of
from reliq.cli.options import Json, QueueName, WholeDesk
from reliq.cli.output import complain, print_json, say
from reliq.cli.progress import progress_bar
from reliq.errors import ConfigurationError
from reliq.outgoing import PublishOptions
from reliq.settings import LARGEST_BODY

if TYPE_CHECKING:
    from reliq.admin import Admin, FilePublished
    from reliq.admin.publish_file import OnError
    from reliq.message import Priority

EXIT_NOT_PUBLISHED = 3
EXAMPLE = "2026-11-21T03:00+01:00"


def publish(
    queue: QueueName,
    body: Annotated[str | None, typer.Argument(help="JSON, sent as it is written; `-` reads it from stdin.")] = None,
    *,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Publish each line of a file as a body.")] = None,
    on_error: Annotated[str, typer.Option(help="At a malformed line: stop, publish nothing; or skip it.")] = "stop",
    raw: Annotated[bool, typer.Option("--raw", help="Send the bytes as they are, JSON or not.")] = False,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    at: Annotated[str | None, typer.Option(metavar="WHEN", help=f"Due then, such as {EXAMPLE}.")] = None,
    retries: Annotated[int | None, typer.Option(help="Deliveries after the first, instead of 12.")] = None,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="How late it may start, instead of 7d.")] = None,
    id: Annotated[str | None, typer.Option(help="An id of yours: not published again while it is known.")] = None,
    dedup: Annotated[str | None, typer.Option(metavar="TIME", help="How long the id is known after its end.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given again.")] = None,
    key: Annotated[str | None, typer.Option(help="Whose message it is: limits and order hold for each key.")] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low; without --key.")] = "normal",
    json: Json = False,
    desk: WholeDesk,
) -> None:
    """
    Publish a message and say what became of it.

    Example: reliq publish reports '{}' --id report-2026-11-21 --dedup 86400

    With --jsonl run it again after an interruption: FILE.reliq-progress says how far it came, and no line is
    published twice. Exit codes: 0 published, or all lines are; 1 Redis did not answer or refused; 2 a wrong option,
    an unreadable file, a body or line that is no JSON; 3 nothing was published, for the id is taken or tombstoned.
    """
    if dedup is not None and id is None and jsonl is None:
        raise ConfigurationError(f"--dedup needs an id of yours: --id report-7 --dedup {dedup}")
    options: PublishOptions = {
        "delay": duration(delay),
        "at": None if at is None else _moment(at),
        "retries": retries,
        "ttl": None if ttl is None else duration(ttl),
        "headers": headers_of(header),
        "dedup": None if dedup is None else duration(dedup),
        "id": id,
        "key": key,
        "priority": cast("Priority", priority),
    }
    if jsonl is None:
        receipt = desk.publish(queue, _body(body), raw=raw, **options)
        print_json(receipt) if json else say(f"{receipt.status} {receipt.id}")
        if not receipt:
            raise typer.Exit(EXIT_NOT_PUBLISHED)
        return
    if body is not None or id is not None:
        raise ConfigurationError("--jsonl takes bodies and ids from the file: leave out BODY and --id")
    done = _publish_lines(desk, queue, jsonl, options, raw=raw, on_error=_on_error(on_error))
    print_json(done) if json else say(done)
    if done.skipped:
        numbers = ", ".join(map(str, done.malformed)) + (", …" if done.skipped > len(done.malformed) else "")
        complain(f"{done.skipped} malformed lines were skipped: {numbers}")
    if done.cancelled and not done.published + done.before:
        raise typer.Exit(EXIT_NOT_PUBLISHED)


def _publish_lines(
    desk: "Admin", queue: str, path: Path, options: PublishOptions, *, raw: bool, on_error: "OnError"
) -> "FilePublished":
    total = path.stat().st_size if path.is_file() else None
    with progress_bar("bytes", total, 0, lambda _at: "what is confirmed is in the progress file") as run:
        return desk.publish_lines(
            queue, path, raw=raw, on_error=on_error, on_step=lambda at: run.step(at - run.sum, at), **options
        )


def _body(given: str | None) -> bytes:
    if given is None:
        raise ConfigurationError("say the BODY, `-` to read it from stdin, or --jsonl FILE")
    if given != "-":
        return given.encode("utf-8", "surrogateescape")
    return sys.stdin.buffer.read(LARGEST_BODY + 1)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise ConfigurationError(f"--at is written {EXAMPLE}, with its offset from UTC, not {text[:40]!r}")
    return moment


def _on_error(text: str) -> "OnError":
    match text:
        case "stop" | "skip":
            return text
    raise ConfigurationError(f"--on-error must be stop or skip, not {text[:40]!r}")
