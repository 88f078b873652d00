"""The configuration of the Django application."""

from django.apps import AppConfig


class ReliqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The tables of the outbox and the inbox."""

    name = "reliq.contrib.django"
    label = "reliq"
    verbose_name = "reliq"
