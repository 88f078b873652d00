"""The units of examples/systemd as systemd reads them, and a test manager in place of systemd."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
from waiting import eventually

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "examples" / "systemd"
#: Names that a reader replaces by the names of their application, with the values for these tests.
PROGRAM, CONSUMER = "/srv/shop/venv/bin/reliq", "shop.jobs:consumer"
OURS = {PROGRAM: f"{Path(sys.executable).parent}/reliq", CONSUMER: "reliq.cli.demo_jobs:consumer"}


def settings(name):
    """Return the settings of a unit's section [Service]; of repeated settings the last value counts."""
    text = (UNITS / name).read_text("utf-8").partition("[Service]\n")[2].partition("\n[Install]")[0]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def command(name, port):
    """Return the words of ExecStart for the worker in this environment, with metrics at `port`."""
    words = [OURS.get(word, word) for word in shlex.split(settings(name)["ExecStart"])]
    return [
        str(port) if before in ("--metrics-port", "--port") else word
        for before, word in zip(["", *words], words, strict=False)
    ]


class Manager:
    """Starts and stops one service as systemd does, and keeps its notifications."""

    def __init__(self, words, folder, environment, *, watchdog=1.0):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.told: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        told = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": f"{watchdog * 1e6:.0f}"}
        # The watchdog variables contain the pid of the main process; the shell passes its pid on by exec.
        line = f"WATCHDOG_PID=$$ exec {shlex.join(words)}"
        self.process = subprocess.Popen(
            ["sh", "-c", line],
            env={**environment, **told},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _listen(self):
        while True:
            try:
                self.told.append(self._socket.recv(4096).decode())
            except OSError:
                return

    def lines(self):
        return [line for datagram in list(self.told) for line in datagram.splitlines()]

    def hears(self, line, times=1):
        """Wait until the service has sent the notification `line`."""
        eventually(lambda: self.lines().count(line) >= times, f"{line} {times} times")

    def stop(self):
        """Stop the service as KillMode=mixed does, with SIGTERM to its main process only; return its exit code."""
        os.kill(self.process.pid, signal.SIGTERM)
        self.said = self.process.communicate(timeout=60)[0]
        return self.process.returncode

    def members(self):
        """Return the running processes of the service: the processes of its session."""
        found = []
        for one in psutil.process_iter():
            try:
                if os.getsid(one.pid) == self.process.pid:
                    found.append(one)
            except OSError:
                continue
        return found

    def close(self):
        for one in self.members():
            one.kill()
        self.process.communicate()
        self._socket.close()
