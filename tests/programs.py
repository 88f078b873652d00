"""Run programs to their end, and request the probes of running workers."""

import subprocess
import sys
import urllib.error
import urllib.request


def run(*words, **options):
    """Run a program; return its exit code and all its output, as text."""
    options = {"timeout": 120} | options
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)


def python(*words, **options):
    """Run Python with these arguments; return its exit code and all its output, as text."""
    return run(sys.executable, *words, **options)


def answer(port, path):
    """Return status and text of a worker's /live, /ready or /metrics; 0 and an empty text without a server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
