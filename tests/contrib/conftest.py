"""A Django project with ReliqBackend, in this process."""

import importlib
import sys

import django
import pytest
from required import must_run_in_ci

from reliq.testing import isolated

BACKEND = "reliq.contrib.django.tasks.ReliqBackend"


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """Configure Django and create its tables; return the name of the package with Django's tasks framework."""
    from django.conf import settings
    from django.core.management import call_command

    package = "django.tasks" if django.VERSION >= (6,) else "django_tasks"
    try:
        importlib.import_module(package)
    except ImportError:
        must_run_in_ci(f"{package} is not installed: pip install -e '.[dev]'")
    sqlite = {"ENGINE": "django.db.backends.sqlite3"}
    folder = tmp_path_factory.mktemp("django")
    settings.configure(
        DATABASES={"default": sqlite | {"NAME": folder / "shop.db"}, "other": sqlite | {"NAME": folder / "other.db"}},
        INSTALLED_APPS=["reliq.contrib.django", "shop_tasks", *([package] if package == "django_tasks" else [])],
        TASKS={
            "default": {
                "BACKEND": BACKEND,
                "QUEUES": ["default", "queue-1"],
                "OPTIONS": {"queue": {"retries": 0}},
            },
            "retried": {"BACKEND": BACKEND, "OPTIONS": {"prefix": "retried-", "queue": {"retries": 2}}},
        },
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0)
    yield package
    from django.db import connections

    connections.close_all()


@pytest.fixture
def kit(project, url):
    """The test kit on the shared server."""
    with isolated(url) as kit:
        yield kit


@pytest.fixture
def tasks(project, kit):
    """The module with the tasks of the app."""
    module = importlib.import_module("shop_tasks.tasks")
    module.SEEN.clear()
    module.SNOOZES.clear()
    return module


@pytest.fixture
def backends(project):
    return sys.modules[project].task_backends


@pytest.fixture
def backend(backends):
    return backends["default"]


@pytest.fixture
def run_worker(kit, backends):
    """Return a function that runs all due tasks of a backend, as a worker does."""

    def run(alias="default", **options):
        return kit.drain(backends[alias].consumer(), **{"fail_fast": False} | options)

    return run
