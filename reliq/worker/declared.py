"""The limits that queues declare, written to Redis: at a start, and when Redis has lost them."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.errors import RedisRefusedError
from reliq.foreign import printable
from reliq.roster import Worker

if TYPE_CHECKING:
    from reliq.client.client import Client
    from reliq.limits import Limits
    from reliq.worker.served import Served

logger = logging.getLogger("reliq")


def write_limits(client: Client, served: Served) -> list[RedisRefusedError]:
    """
    Write the limits of those queues for which Redis has others, and say so; return what it refused.

    What was changed since the same limits were declared stays as it is: only another declaration writes over it. While a
    worker of an older version is alive, which would bury messages with keys, a queue gets none: a later call writes them.
    """
    refused: list[RedisRefusedError] = []
    if not (asked := served.undeclared()):
        return refused
    old = _served_by_older_workers(client)
    for queue, _ in asked:
        if queue.name in old and served.holds_back(queue.name):
            logger.warning(
                "%s: its limits are not written until every worker of an older version has stopped", queue.name
            )
    asked = [one for one in asked if one[0].name not in old]
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


def _served_by_older_workers(client: Client) -> set[str]:
    """Return the queues on which a worker works that knows no keys; who may not read the roster knows of none."""
    (ids,) = client.run_all([commands.worker_ids()])
    records = [] if isinstance(ids, Exception) else client.run_all(commands.worker_records(ids))
    return {name for one in records if isinstance(one, Worker) and not one.keys for name in one.queues}


def _told(limits: Limits) -> str:
    """Return what limits a queue has, as its declaration says it."""
    said = {one.name: getattr(limits, one.name) for one in fields(limits)}
    return ", ".join(f"{name}={value}" for name, value in said.items() if value)
