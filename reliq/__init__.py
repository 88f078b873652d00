"""reliq: a reliable, at-least-once job queue on the Redis you already run."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "reliq needs a POSIX system: its connections use poll, its workers fork handlers and signals; "
        "on Windows, run it in WSL or in a container"
    )


from reliq.admin import Admin
from reliq.answers import Ack, Answer, Nack, Reject, Snooze
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
from reliq.handlers.job import Job
from reliq.keys import Layout
from reliq.message import BulkResult, Counts, Letter, Outgoing, Pause, Receipt
from reliq.queue import Queue
from reliq.settings import Durability, WorkerSettings

__all__ = [
    "Ack",
    "Admin",
    "Answer",
    "BodyError",
    "BulkResult",
    "ConfigurationError",
    "Consumer",
    "Counts",
    "Durability",
    "InsecureWarning",
    "Job",
    "Layout",
    "Letter",
    "LoginError",
    "Nack",
    "Outgoing",
    "Pause",
    "ProtocolError",
    "PublishFailed",
    "Queue",
    "Receipt",
    "RedisRefusedError",
    "RedisUnavailableError",
    "Reject",
    "ReliqError",
    "Snooze",
    "Stopped",
    "UndecodableError",
    "WorkerSettings",
    "WrongKeyTypeError",
]

__version__ = "0.1.0"
