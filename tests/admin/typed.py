"""The command as a person types it."""

import subprocess
import sys


def reliq(*args, url=None, **environment):
    """Run the command; return exit code, output and errors."""
    command = [sys.executable, "-m", "reliq", *args, *(["--url", url] if url else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **environment)
    return done.returncode, done.stdout, done.stderr
