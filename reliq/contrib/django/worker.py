"""
One consumer for each `ReliqBackend` in the setting TASKS, named by the backend's alias.

Start a worker with `reliq worker reliq.contrib.django.worker:ALIAS`.
"""

import django
from django.apps import apps

if not apps.ready:
    django.setup()

from reliq.contrib.django.backend import consumers

globals().update(consumers())
