"""The Django application `reliq.contrib.django`."""

from django.apps import AppConfig


class ReliqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Adds the tables of the outbox and the inbox to a Django project."""

    name = "reliq.contrib.django"
    label = "reliq"
    verbose_name = "reliq"
