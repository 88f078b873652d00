"""The limits that queues declare, written to Redis: at a start, and when Redis has lost them."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.errors import RedisRefusedError
from reliq.foreign import printable

if TYPE_CHECKING:
    from reliq.client.client import Client
    from reliq.limits import Limits
    from reliq.worker.served import Served

logger = logging.getLogger("reliq")


def write_limits(client: Client, served: Served) -> list[RedisRefusedError]:
    """
    Write the limits of those queues for which Redis has others, and say so; return what it refused.

    What was changed since the same limits were declared stays as it is: only another declaration writes over it.
    """
    refused: list[RedisRefusedError] = []
    if not (asked := served.undeclared()):
        return refused
    calls = [transitions.limit(queue.keys, limits.fields(), declared=limits.declared) for queue, limits in asked]
    for (queue, limits), answer in zip(asked, client.run_all(calls), strict=True):
        if isinstance(answer, RedisRefusedError):
            refused.append(answer)
            logger.error("queue %s: its limits cannot be written to Redis: %s", queue.name, answer)
        elif not isinstance(answer, Exception):
            served.declared(queue.name, limits)
            if answer:
                logger.info("%s: limits written: %s", queue.name, printable(_told(limits)))
    return refused


def _told(limits: Limits) -> str:
    """Return what limits a queue has, as its declaration says it."""
    said = {one.name: getattr(limits, one.name) for one in fields(limits)}
    return ", ".join(f"{name}={value}" for name, value in said.items() if value)
