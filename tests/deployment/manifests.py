"""The manifests of examples/kubernetes as Kubernetes reads them, and a container's command run on this machine."""

import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
#: A process that sees all files read-only except one folder, like readOnlyRootFilesystem with an emptyDir.
READ_ONLY = ["unshare", "--map-root-user", "--mount"]
_MOUNTS = 'mount --rbind / / && mount -o remount,bind,ro / && mount -t tmpfs tmpfs "$TMPDIR" && exec '


@cache
def read(name):
    """Return the objects of a file by their kinds."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text("utf-8"))}


def rules(*options):
    """Return the completed process of rules.py."""
    command = [sys.executable, FOLDER / "rules.py", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pod(name):
    """Return the specification of the pods of a deployment, and the specification of their container."""
    spec = read(name)["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def may_be_read_only(folder):
    """Return whether this user may start a process with its own read-only mounts."""
    command, environment = [*READ_ONLY, "sh", "-c", _MOUNTS + "true"], {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 0


def start(container, url, port, folder):
    """Start the container's command with metrics on a loopback port and all files read-only except TMPDIR."""
    changes = {"--metrics-host=0.0.0.0": "--metrics-host=127.0.0.1", "--metrics-port=9464": f"--metrics-port={port}"}
    _, *words = [changes.get(word, word) for word in container["args"]]
    command = shlex.join([sys.executable, "-m", "reliq", *words])
    return subprocess.Popen(
        [*READ_ONLY, "sh", "-c", _MOUNTS + command],
        env={**os.environ, "RELIQ_URL": url, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
