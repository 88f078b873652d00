"""reliq: a reliable, at-least-once job queue on the Redis you already run."""

import sys
import warnings
from typing import TYPE_CHECKING

import reliq.distribution as _distribution
from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.admin import Admin, AsyncAdmin
    from reliq.answers import Ack, Answer, Nack, RateLimited, Reject, Snooze
    from reliq.consumer.consumer import Consumer
    from reliq.errors import (
        BodyError,
        ConfigurationError,
        InsecureWarning,
        LoginError,
        ProtocolError,
        PublishFailed,
        RedisRefusedError,
        RedisUnavailableError,
        ReliqError,
        Stopped,
        UndecodableError,
        WrongKeyTypeError,
    )
    from reliq.events import Event, Observer
    from reliq.handlers.job import Job
    from reliq.keys import Layout
    from reliq.message import (
        BulkResult,
        CancelStatus,
        Counts,
        DeathReason,
        Duration,
        Header,
        Letter,
        Pause,
        Priority,
        PublishStatus,
        Receipt,
        RescheduleStatus,
    )
    from reliq.outgoing import Outgoing, PublishOptions
    from reliq.queue import Queue
    from reliq.receive.received import Received
    from reliq.relay.relay import Relay
    from reliq.settings import Durability, QueueSettings, WorkerSettings
    from reliq.transport.target import Target

if sys.platform == "win32":
    raise ImportError(
        "reliq needs a POSIX system: its connections use poll, its workers fork handlers and signals; "
        "on Windows, run it in WSL or in a container"
    )
if _collision := _distribution.collision(__path__[0]):
    warnings.warn(_collision, stacklevel=2)

__all__ = [
    "Ack",
    "Admin",
    "Answer",
    "AsyncAdmin",
    "BodyError",
    "BulkResult",
    "CancelStatus",
    "ConfigurationError",
    "Consumer",
    "Counts",
    "DeathReason",
    "Durability",
    "Duration",
    "Event",
    "Header",
    "InsecureWarning",
    "Job",
    "Layout",
    "Letter",
    "LoginError",
    "Nack",
    "Observer",
    "Outgoing",
    "Pause",
    "Priority",
    "ProtocolError",
    "PublishFailed",
    "PublishOptions",
    "PublishStatus",
    "Queue",
    "QueueSettings",
    "RateLimited",
    "Receipt",
    "Received",
    "RedisRefusedError",
    "RedisUnavailableError",
    "Reject",
    "Relay",
    "ReliqError",
    "RescheduleStatus",
    "Snooze",
    "Stopped",
    "Target",
    "UndecodableError",
    "WorkerSettings",
    "WrongKeyTypeError",
]

__version__ = _distribution.VERSION

if not TYPE_CHECKING:  # a type checker sees every name above, and that there is no other
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "reliq.admin": "Admin AsyncAdmin",
            "reliq.answers": "Ack Answer Nack RateLimited Reject Snooze",
            "reliq.consumer.consumer": "Consumer",
            "reliq.errors": (
                "BodyError ConfigurationError InsecureWarning LoginError ProtocolError "
                "PublishFailed RedisRefusedError RedisUnavailableError ReliqError Stopped "
                "UndecodableError WrongKeyTypeError"
            ),
            "reliq.events": "Event Observer",
            "reliq.handlers.job": "Job",
            "reliq.keys": "Layout",
            "reliq.message": (
                "BulkResult CancelStatus Counts DeathReason Duration Header Letter Pause Priority "
                "PublishStatus Receipt RescheduleStatus"
            ),
            "reliq.outgoing": "Outgoing PublishOptions",
            "reliq.queue": "Queue",
            "reliq.receive.received": "Received",
            "reliq.relay.relay": "Relay",
            "reliq.settings": "Durability QueueSettings WorkerSettings",
            "reliq.transport.target": "Target",
        },
    )
