"""`reliq exporter`: the figures of queues for Prometheus, with no worker alive."""

import http.client
import secrets
from enum import StrEnum
from http import HTTPStatus
from importlib import import_module
from typing import Annotated, Any

import typer

from reliq.cli.options import DEFAULT_LAYOUT, LayoutText, Url, admin
from reliq.cli.output import say
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.logs import configure_logging
from reliq.worker.health import DEFAULT_HOST

DEFAULT_PORT = 9465


def exporter(
    url: Url = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be given again. Else all that workers have served.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="The address to serve them on.")] = DEFAULT_HOST,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Serve the states, ages and totals of queues for Prometheus until SIGTERM or Ctrl-C.

    Example: reliq exporter --url redis://127.0.0.1:6379/0 --port 9465
    """
    configure_logging("info")
    queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
    import_module("reliq.metrics.serving").export(url, queues, port, host)


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


DEFAULT_WEB_PORT, DEFAULT_WEB_HOST = 9470, "127.0.0.1"
TOKEN_VARIABLE = "RELIQ_WEB_TOKEN"  # noqa: S105  the name of one


def web(
    port: Annotated[int, typer.Option(help="Serve the page on this port; 0 for any that is free.")] = DEFAULT_WEB_PORT,
    host: Annotated[str, typer.Option(help="The address to serve it on.")] = DEFAULT_WEB_HOST,
    write: Annotated[
        bool, typer.Option("--write", help="Visitors may pause, cancel, redrive and delete; else they only look.")
    ] = False,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Visitors may see bodies, headers and errors, when they ask for them.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Opens the page too. Others see a command line: set the variable."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A host name under which visitors reach the page, for example ops.example.com."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES", help="Believe X-Forwarded-For and -Proto of these proxies, for example 127.0.0.1,::1."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Stands in the browser's tab.")] = "reliq",
    url: Url = None,
) -> None:
    """
    Serve a page of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.

    It prints an address that lets one browser in. Programs and other browsers need the token; beyond this machine the
    page is served only with one, and its connections are not encrypted: put a proxy with TLS before it.

    Example: reliq web --write

    Exit codes: 0 it was stopped, 2 a wrong option, a port that is taken, or the extra `web` is missing.
    """
    from reliq.redis.url import is_near  # noqa: PLC0415  completion does not wait for it

    if not token and not is_near(host):
        raise ConfigurationError(f"--host {host} is reached from other machines: give a token, in {TOKEN_VARIABLE}")
    page, server = _parts()
    grants = page.Access.READ
    grants |= page.Access.WRITE if write else page.Access.NONE
    grants |= page.Access.BODIES if bodies else page.Access.NONE
    who = import_module("reliq.queue").who()
    app = page.app(
        admin(url),
        token=token or secrets.token_urlsafe(),
        grants=grants.by(who),
        hosts=[host, *(allowed_host or ())],
        title=title,
    )
    with server.listen(host, port) as listener:
        configure_logging("info")
        at = f"[{host}]" if ":" in host else host
        say(
            f"http://{at}:{listener.getsockname()[1]}/enter/{app.desk.token.once()}",
            f"This address works once. Visitors may {_allowed(write=write, bodies=bodies)}.",
        )
        server.serve(app, listener, proxy)


def _parts() -> tuple[Any, Any]:
    """Return the page and its server; raise ConfigurationError when their extra is not installed."""
    try:
        return import_module("reliq.web"), import_module("reliq.web.serve")
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(error)) from None


def _allowed(*, write: bool, bodies: bool) -> str:
    """Return what visitors may do, in words."""
    see = "see bodies, headers and errors" if bodies else "look, without bodies, headers and errors"
    return f"{see}, and change things" if write else f"{see}; --write lets them change things"
