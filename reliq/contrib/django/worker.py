"""The consumers of the backends in the setting TASKS, for `reliq worker reliq.contrib.django.worker:ALIAS`."""

import django
from django.apps import apps

if not apps.ready:
    django.setup()

from reliq.contrib.django.backend import consumers

globals().update(consumers())
