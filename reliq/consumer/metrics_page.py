"""The page of figures that a worker process serves by itself."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from reliq.events import Observer
    from reliq.handlers.registration import Registration
    from reliq.health import EngineStats
    from reliq.metrics.serving import Registry


def served(
    registration: Registration,
    queues: Sequence[str],
    observers: list[Observer],
    stats: Callable[[], EngineStats | None],
    *,
    port: int | None,
    host: str | None,
    registry: Registry | None,
) -> AbstractContextManager[Any]:
    """Return what serves the figures of this process within a `with` block; nothing when nobody asks for them."""
    if port is None and registry is None:
        return nullcontext()
    handlers = registration.chosen(queues)
    # The module is imported here, for the client of Prometheus comes with it.
    serving = import_module("reliq.metrics.serving")
    keys = [handler.queue.keys for handler in handlers]
    page: AbstractContextManager[Any] = serving.of_one_process(
        observers, stats, registration.connection(handlers), keys, port=port, host=host, registry=registry
    )
    return page
