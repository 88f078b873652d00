"""reliq: a reliable, at-least-once job queue on the Redis you already run."""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import reliq.distribution as _distribution

if TYPE_CHECKING:
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
    from reliq.message import BulkResult, Counts, Letter, Pause, Receipt
    from reliq.outgoing import Outgoing
    from reliq.queue import Queue
    from reliq.relay.relay import Relay
    from reliq.settings import Durability, WorkerSettings

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
    "Relay",
    "ReliqError",
    "Snooze",
    "Stopped",
    "UndecodableError",
    "WorkerSettings",
    "WrongKeyTypeError",
]

__version__ = _distribution.VERSION

#: Module -> the public names that are imported from it when they are first used.
_HOMES = {
    "reliq.admin": ("Admin",),
    "reliq.answers": (
        "Ack",
        "Answer",
        "Nack",
        "Reject",
        "Snooze",
    ),
    "reliq.consumer.consumer": ("Consumer",),
    "reliq.errors": (
        "BodyError",
        "ConfigurationError",
        "InsecureWarning",
        "LoginError",
        "ProtocolError",
        "PublishFailed",
        "RedisRefusedError",
        "RedisUnavailableError",
        "ReliqError",
        "Stopped",
        "UndecodableError",
        "WrongKeyTypeError",
    ),
    "reliq.handlers.job": ("Job",),
    "reliq.keys": ("Layout",),
    "reliq.message": (
        "BulkResult",
        "Counts",
        "Letter",
        "Pause",
        "Receipt",
    ),
    "reliq.outgoing": ("Outgoing",),
    "reliq.queue": ("Queue",),
    "reliq.relay.relay": ("Relay",),
    "reliq.settings": (
        "Durability",
        "WorkerSettings",
    ),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a command that asks no Redis need not wait for its client."""
    for module, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(module), name)
            return globals()[name]
    raise AttributeError(f"module 'reliq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
