"""`reliq health`: the answer of a worker's /live or /ready as an exit code, for probes that run a command."""

import http.client
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated

import typer

from reliq.cli.output import say
from reliq.health import DEFAULT_HOST

TIMEOUT_SECONDS = 5.0
#: At most this many bytes of an answer are read: whatever listens there may say anything.
MOST_BYTES = 65_536


class Check(StrEnum):
    """The question to a worker."""

    live = "live"
    ready = "ready"


def health(
    check: Annotated[Check, typer.Argument(help="live: need not be restarted; ready: works, and Redis answers.")],
    port: Annotated[int, typer.Option(help="The worker's --metrics-port.")],
    host: Annotated[str, typer.Option(help="The worker's --metrics-host.")] = DEFAULT_HOST,
) -> None:
    """
    Ask a worker on its metrics port; exit 0 when all is well, else 1 with the reason.

    Example: reliq health live --port 9464
    """
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"/{check}")
        answer = connection.getresponse()
        status, text = answer.status, answer.read(MOST_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"no answer from {host}:{port}: {error}"
    finally:
        connection.close()
    say(*text.splitlines(), stderr=status != HTTPStatus.OK)
    raise typer.Exit(0 if status == HTTPStatus.OK else 1)
