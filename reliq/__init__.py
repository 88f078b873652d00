"""reliq: a reliable, at-least-once job queue on the Redis you already run."""

import sys
import warnings
from typing import TYPE_CHECKING

import reliq.distribution as _distribution

if TYPE_CHECKING:
    from reliq.admin import Admin as Admin, AsyncAdmin as AsyncAdmin
    from reliq.consumer import Consumer as Consumer
    from reliq.errors import (
        BodyError as BodyError,
        ConfigurationError as ConfigurationError,
        InsecureWarning as InsecureWarning,
        JobInterrupted as JobInterrupted,
        LoginError as LoginError,
        ProtocolError as ProtocolError,
        PublishFailed as PublishFailed,
        RedisRefusedError as RedisRefusedError,
        RedisUnavailableError as RedisUnavailableError,
        ReliqError as ReliqError,
        UndecodableError as UndecodableError,
        WrongKeyTypeError as WrongKeyTypeError,
    )
    from reliq.events import Event as Event, Observer as Observer
    from reliq.handlers.handler import Job as Job
    from reliq.keys import Layout as Layout
    from reliq.limits import Limit as Limit
    from reliq.message import (
        Ack as Ack,
        BulkResult as BulkResult,
        CancelStatus as CancelStatus,
        Counts as Counts,
        DeadLetter as DeadLetter,
        DeathReason as DeathReason,
        Debounce as Debounce,
        Duration as Duration,
        Header as Header,
        Nack as Nack,
        Outcome as Outcome,
        OutgoingMessage as OutgoingMessage,
        Pause as Pause,
        Priority as Priority,
        PublishOptions as PublishOptions,
        PublishStatus as PublishStatus,
        RateLimited as RateLimited,
        Receipt as Receipt,
        Reject as Reject,
        RescheduleStatus as RescheduleStatus,
        Snooze as Snooze,
        Status as Status,
        Throttle as Throttle,
    )
    from reliq.outbox.relay import Relay as Relay
    from reliq.queue import Queue as Queue
    from reliq.receive.receiver import ReceivedJob as ReceivedJob
    from reliq.redis.url import Target as Target
    from reliq.settings import (
        Durability as Durability,
        QueueSettings as QueueSettings,
        WorkerSettings as WorkerSettings,
    )
    from reliq.tasks import Task as Task, Tasks as Tasks

if sys.platform == "win32":
    raise ImportError(
        "reliq needs a POSIX system: its connections use poll, and its workers use signals and fork hooks; "
        "on Windows, run it in WSL or in a container"
    )
if _collision := _distribution.collision(__path__[0]):
    warnings.warn(_collision, stacklevel=2)

__version__ = _distribution.VERSION

if not TYPE_CHECKING:  # type checkers use the imports above; at run time, a name is imported at its first use
    __getattr__, __dir__, __all__ = _distribution.lazy_names(
        __name__,
        {
            "reliq.admin": "Admin AsyncAdmin",
            "reliq.consumer": "Consumer",
            "reliq.errors": "BodyError ConfigurationError InsecureWarning LoginError ProtocolError PublishFailed RedisRefusedError RedisUnavailableError ReliqError JobInterrupted UndecodableError WrongKeyTypeError",
            "reliq.events": "Event Observer",
            "reliq.handlers.handler": "Job",
            "reliq.keys": "Layout",
            "reliq.limits": "Limit",
            "reliq.message": "Ack Outcome BulkResult CancelStatus Counts DeathReason Debounce Duration Header DeadLetter Nack OutgoingMessage Pause Priority PublishOptions PublishStatus RateLimited Receipt Reject RescheduleStatus Snooze Status Throttle",
            "reliq.outbox.relay": "Relay",
            "reliq.queue": "Queue",
            "reliq.receive.receiver": "ReceivedJob",
            "reliq.redis.url": "Target",
            "reliq.settings": "Durability QueueSettings WorkerSettings",
            "reliq.tasks": "Task Tasks",
        },
    )
