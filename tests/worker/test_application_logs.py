"""A worker's log also contains the application's lines: none is dropped, and the application's setup stays."""

import json

import pytest
from worker_process import Worker, environment_for

from reliq import Queue

COUNTING = """
import logging
from reliq import Consumer
{setup}
log = logging.getLogger("my.app.audit")
consumer = Consumer()

@consumer.handler("charges", retry_on=())
def charge(body, job):
    log.info("charged customer %d", body["customer"], extra={{"tenant": "acme"}})
    if body["customer"] == 7:
        raise ValueError("a piece of the body")
"""

DICT_CONFIG = """
from logging.config import dictConfig
dictConfig({
    "version": 1,
    "formatters": {"mine": {"format": "MINE %(name)s %(message)s"}},
    "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "mine"}},
    "root": {"level": "INFO", "handlers": ["err"]},
})
"""

IN_LIFESPAN = """
from contextlib import contextmanager

@contextmanager
def life():
{setup}
    yield
"""


@pytest.fixture
def lines_of(url, tmp_path):
    """Run a worker over a hundred charges, one of which fails; return its output lines."""

    def run(source, *options):
        (tmp_path / "billing.py").write_text(source)
        Queue("charges", url=url).publish_many({"customer": number} for number in range(100))
        worker = Worker("billing:consumer", tmp_path, environment_for(tmp_path, url), "--burst", *options)
        try:
            assert worker.wait() == 0, worker.lines
        finally:
            worker.close()
        return worker.lines

    return run


def test_every_line_of_the_application_is_written_with_its_extra(lines_of):
    rows = [json.loads(line) for line in lines_of(COUNTING.format(setup=""), "--log-format", "json") if line[0] == "{"]

    charged = [row for row in rows if row["logger"] == "my.app.audit"]
    assert sorted(row["message"] for row in charged) == sorted(f"charged customer {number}" for number in range(100))
    assert {row["tenant"] for row in charged} == {"acme"}


def test_an_application_that_configures_logging_itself_keeps_its_format_and_hears_us(lines_of):
    lines = lines_of(COUNTING.format(setup=DICT_CONFIG), "--log-format", "text")

    assert sum(line.startswith("MINE my.app.audit charged customer") for line in lines) == 100
    assert any(line.startswith("MINE reliq") and "ValueError at billing.py" in line for line in lines)
    assert any("--log-format text is ignored" in line for line in lines)


def test_a_lifespan_that_configures_logging_does_not_silence_us(lines_of):
    inner = "\n".join("    " + line for line in DICT_CONFIG.splitlines())
    source = COUNTING.format(setup=IN_LIFESPAN.format(setup=inner)).replace("Consumer()", "Consumer(lifespan=life)")

    lines = lines_of(source)

    assert any(line.startswith("MINE reliq") and "ValueError at billing.py" in line for line in lines)
