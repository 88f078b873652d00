"""If the reader of the log hangs, log lines block no thread: they are buffered, then dropped and counted."""

import logging
import os
import subprocess
import sys
import threading

from waiting import eventually

from reliq.logs import LINES_LIMIT, BackgroundHandler


def test_lines_that_nothing_reads_are_dropped_and_counted():
    reading, writing = os.pipe()
    lines = []
    with os.fdopen(reading) as reader:
        with os.fdopen(writing, "w") as stream:
            handler = BackgroundHandler(stream)
            for _ in range(LINES_LIMIT + 200):
                handler.handle(logging.makeLogRecord({"msg": "x" * 4096}))
            thread = threading.Thread(target=lambda: lines.extend(reader))
            thread.start()
            eventually(lambda: handler._writer.wait(1), "all that waits is written")
            handler.handle(logging.makeLogRecord({"msg": "the end"}))
        thread.join()

    dropped = [int(line.split()[0]) for line in lines if "were dropped" in line]
    assert dropped
    assert sum(dropped) + sum(line.startswith("x") for line in lines) == LINES_LIMIT + 200


def test_line_is_written_before_the_call_returns_while_the_pipe_is_read(monkeypatch):
    monkeypatch.setattr("reliq.logs.WRITE_SECONDS", 60)  # a busy machine may need more than a tenth of a second
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        BackgroundHandler(stream).handle(logging.makeLogRecord({"msg": "last words"}))

        os.set_blocking(reading, False)
        assert reader.read() == b"last words\n"


def test_signal_handler_that_logs_while_its_thread_logs_blocks_nothing():
    program = """
import logging, signal, sys
from reliq.logs import BackgroundHandler
log = logging.getLogger("x")
log.addHandler(BackgroundHandler(sys.stderr))
running = []
def handle(*_):
    if not running:  # on a busy machine the next signal may come before the handler ends, again and again
        running.append(1)
        log.error("from the handler")
        running.clear()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for number in range(3000):
    log.error("line %d", number)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0
    assert "from the handler" in done.stderr
