"""
A command started by `command &` in a script inherits an ignored SIGINT; under `nohup` SIGHUP is ignored too.

Commands keep ignoring these signals, as other programs do: Ctrl-C is meant for the script. SIGTERM stops them.
"""

import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import worker_process
from ports import free_port
from waiting import eventually

pytestmark = pytest.mark.slow

IGNORING = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", sys.executable, "-m", "reliq"]
#: Command -> its arguments, and its exit code after SIGTERM.
COMMANDS = {
    "worker": (["worker", "jobs:consumer", "--processes", "2"], 0),
    "relay": (["relay", "--database", "sqlite:///outbox.db"], 0),
    "exporter": (["exporter", "--port", "{port}"], 0),
    "web": (["web", "--port", "{port}"], 0),
    "watch": (["watch"], 0),
    "demo": (["demo", "--jobs", "20000"], 128 + signal.SIGTERM),
    "bench": (["bench", "--messages", "100000", "--yes"], 128 + signal.SIGTERM),
}


def signals_of(process, field):
    """Return the signals in a field of the process status, such as SigIgn or SigCgt."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return {number for number in signal.Signals if int(lines[field], 16) >> (number - 1) & 1}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_with_ignored_sigint_stops_on_sigterm(name, url, client, environment):
    words, code = COMMANDS[name]
    with tempfile.TemporaryDirectory(prefix="reliq-") as folder:
        if name == "relay":
            make_outbox(f"{folder}/outbox.db")
        own = {"RELIQ_URL": ""} if name == "demo" else {}
        controller, screen = pty.openpty()  # `watch` runs on a terminal alone
        process = subprocess.Popen(
            [*IGNORING, *(word.format(port=free_port()) for word in words)],
            cwd=folder,
            env=environment | own | {"TMPDIR": folder},
            stdout=screen if name == "watch" else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(screen)
        reader = threading.Thread(target=read_to_the_end, args=[controller])
        reader.start()
        try:
            eventually(lambda: process.poll() is not None or works(name, process, client), f"{name} works")
            others = psutil.Process(process.pid).children(recursive=True)
            ignored = signals_of(process, "SigIgn")
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)

            assert process.wait(60) == code
            assert {signal.SIGINT, signal.SIGHUP} <= ignored
            assert psutil.wait_procs(others, 60)[1] == []
            assert [one.name for one in Path(folder).iterdir() if not one.name.startswith("outbox.db")] == []
        finally:
            process.kill()
            process.wait()
            reader.join()
            os.close(controller)


@pytest.mark.parametrize("name", ["relay", "exporter", "web"])
def test_command_that_gets_further_signals_until_it_ends_exits_with_0(name, environment, tmp_path):
    """
    A second signal may arrive while the handler of the first runs: the handlers must not wait for each other's lock.

    A signal may also arrive after Python has restored the original handlers at exit.
    """
    make_outbox(tmp_path / "outbox.db")
    words = [word.format(port=free_port()) for word in COMMANDS[name][0]]
    with closing(worker_process.Command(tmp_path, environment, *words)) as command:
        eventually(lambda: signal.SIGTERM in signals_of(command.process, "SigCgt"), f"{name} works")
        command.process.send_signal(signal.SIGINT)

        def has_ended():
            command.process.send_signal(signal.SIGTERM)
            return command.process.poll() is not None

        eventually(has_ended, f"{name} ends")
        assert command.process.returncode == 0


def read_to_the_end(controller):
    with suppress(OSError):  # EIO: no process has the terminal open any more
        while os.read(controller, 65_536):
            pass


def works(name, process, client):
    """Return whether the command works and has set its signal handlers."""
    match name:
        case "bench":
            return client.keys("*:ready")
        case "demo":
            return sum(map(worker_process.works, psutil.Process(process.pid).children(recursive=True))) == 2
        case "worker":
            return client.exists("reliq:workers")
    return signal.SIGTERM in signals_of(process, "SigCgt")


def make_outbox(path):
    from sqlalchemy import create_engine

    from reliq import outbox

    engine = create_engine(f"sqlite:///{path}")
    outbox.metadata().create_all(engine)
    engine.dispose()
