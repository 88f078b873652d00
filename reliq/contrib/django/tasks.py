"""`ReliqBackend`, the backend for Django's setting TASKS."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the backend only when used, because Celery imports this module even without `django-tasks`."""
    if name != "ReliqBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reliq.contrib.django.backend import ReliqBackend  # noqa: PLC0415

    return ReliqBackend
