"""Every address of the page, and what a visitor must be allowed to do there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.web import reading, writing
from reliq.web.access import Access

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from reliq.web.visit import Visit


@dataclass(frozen=True, slots=True)
class WebPage:
    """
    One address.

    Attributes:
        needs: what a visitor must be allowed.
        answer: makes the page; it is called in a thread, for it may ask Redis.
    """

    name: str
    path: str
    needs: Access
    answer: Callable[[Visit], Response]
    method: str = "GET"


PAGES = (
    WebPage("queues", "/", Access.READ, reading.queues),
    WebPage("queue", "/queues/{queue}", Access.READ, reading.queue),
    WebPage("messages", "/queues/{queue}/messages/{state}", Access.READ, reading.messages),
    WebPage("dead", "/queues/{queue}/dead", Access.READ, reading.dead),
    WebPage("keys", "/queues/{queue}/keys", Access.READ, reading.keys),
    WebPage("message", "/queues/{queue}/message", Access.READ, reading.message),
    WebPage("work", "/progress/{id}", Access.READ, reading.work),
    WebPage("works", "/progress", Access.READ, reading.works),
    WebPage("workers", "/workers", Access.READ, reading.workers),
    WebPage("worker", "/workers/{id}", Access.READ, reading.worker),
    WebPage("crons", "/periodic", Access.READ, reading.crons),
    WebPage("cron", "/queues/{queue}/periodic", Access.READ, reading.cron),
    WebPage("account", "/account", Access.READ, reading.account),
    WebPage("doctor", "/doctor", Access.READ, reading.doctor),
    WebPage("check", "/queues/{queue}/check", Access.READ, writing.check, "POST"),
    WebPage("pause", "/queues/{queue}/pause", Access.WRITE, writing.pause, "POST"),
    WebPage("resume", "/queues/{queue}/resume", Access.WRITE, writing.resume, "POST"),
    WebPage("pause_key", "/queues/{queue}/keys/pause", Access.WRITE, writing.pause_key, "POST"),
    WebPage("resume_key", "/queues/{queue}/keys/resume", Access.WRITE, writing.resume_key, "POST"),
    WebPage("limits", "/queues/{queue}/limits", Access.WRITE, writing.limits, "POST"),
    WebPage("purge", "/queues/{queue}/purge", Access.WRITE, writing.purge, "POST"),
    WebPage("cancel", "/queues/{queue}/cancel", Access.WRITE, writing.cancel, "POST"),
    WebPage("reschedule", "/queues/{queue}/reschedule", Access.WRITE, writing.reschedule, "POST"),
    WebPage("redrive", "/queues/{queue}/dead/redrive", Access.WRITE, writing.redrive, "POST"),
    WebPage("delete", "/queues/{queue}/dead/delete", Access.WRITE, writing.delete, "POST"),
    WebPage("run_cron", "/queues/{queue}/periodic/run", Access.WRITE, writing.run_cron, "POST"),
    WebPage("pause_cron", "/queues/{queue}/periodic/pause", Access.WRITE, writing.pause_cron, "POST"),
    WebPage("resume_cron", "/queues/{queue}/periodic/resume", Access.WRITE, writing.resume_cron, "POST"),
    WebPage("stacks", "/workers/{id}/stacks", Access.WRITE, writing.stacks, "POST"),
    WebPage("stop", "/progress/{id}/stop", Access.READ, writing.stop, "POST"),
)
#: The addresses that the application answers itself: the stream, and those that need no access.
OTHERS = {
    "live": "/stream",
    "login": "/login",
    "enter": "/enter/{once}",
    "logout": "/logout",
    "health": "/health",
    "static": "/static/{path:path}",
}
PATHS = {page.name: page.path for page in PAGES} | OTHERS
