"""The Django application `reliq.contrib.django`."""

from django.apps import AppConfig


class ReliqConfig(AppConfig):  # type: ignore[misc]  # Django has no type hints
    """The app configuration, which adds the outbox and inbox tables to a Django project."""

    name = "reliq.contrib.django"
    label = "reliq"
    verbose_name = "reliq"
