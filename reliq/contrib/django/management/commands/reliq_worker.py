"""The command `manage.py reliq_worker`."""

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, handle_default_options

from reliq.cli.app import main


class Command(BaseCommand):  # type: ignore[misc]  # Django has no type hints
    """Run `reliq worker` with the tasks of a backend. All options except Django's are passed to `reliq worker`."""

    help = "Run the tasks of ReliqBackend until SIGTERM or Ctrl-C. Takes all options of `reliq worker`, such as --processes 4."

    def add_arguments(self, parser: Any) -> None:
        """Add the option that selects the backend."""
        parser.add_argument("--backend", default="default", help="Name of the backend in TASKS. Default: default.")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the worker; exit with its exit code."""
        options, rest = self.create_parser(*argv[:2]).parse_known_args(argv[2:])
        handle_default_options(options)
        # Worker processes must import modules from the same folders: the folder of manage.py, and --pythonpath.
        found = sys.path[: 2 if options.pythonpath else 1]
        os.environ["PYTHONPATH"] = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.argv = ["reliq", "worker", f"reliq.contrib.django.worker:{options.backend}", *rest]
        main()
