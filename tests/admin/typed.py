"""The command as a person types it, in this process: starting one takes longer than the command itself."""

import contextlib
import io
import sys
from unittest import mock

from reliq.cli.app import main


def reliq(*args, url=None):
    """Run the command; return exit code, output and errors."""
    out, error, code = io.StringIO(), io.StringIO(), 0
    command = ["reliq", *args, *(["--url", url] if url else [])]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), error.getvalue()
