"""`reliq web` as a user starts it."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest
from site_page import TOKEN

from reliq.cli.app import main

LIMIT = 60


@pytest.fixture
def start(url):
    """Start `reliq web` with these arguments; it ends with the test."""
    with ExitStack() as stack:

        def make(*words, **environment):
            command = [sys.executable, "-m", "reliq", "web", "--port", "0", "--url", url, *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, env=os.environ | environment, **pipes))
            stack.callback(process.kill)
            return process

        yield make


def test_command_prints_an_address_that_lets_a_browser_in_and_stops_cleanly(orders, start):
    process = start("--write", "--title", "shop", RELIQ_WEB_TOKEN=TOKEN)
    address = process.stdout.readline().strip()
    with httpx.Client(follow_redirects=True, timeout=LIMIT, headers={"Sec-Fetch-Site": "same-origin"}) as browser:
        page = browser.post(address)
        again = httpx.get(address, timeout=LIMIT)
        base = address.partition("/enter/")[0]
        program = httpx.get(f"{base}/queues/orders", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=LIMIT)
        paused = browser.post(f"{base}/queues/orders/pause", data={"reason": "a look"})
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)  # although browsers keep connections open
    errors = process.stderr.read()

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/enter/[\w-]{20,}", address)
    assert (page.status_code, again.status_code, program.status_code, paused.status_code) == (200, 401, 200, 200)
    assert "<title>Queues · shop</title>" in page.text
    assert code == 0, errors
    assert re.search(r"\w+@\S+ at 127\.0\.0\.1: pause orders reason='a look'", errors)
    assert TOKEN not in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "RELIQ_WEB_TOKEN"),
        (("--host", "somewhere.example"), "RELIQ_WEB_TOKEN"),
        (("--port", "70000"), "port must be"),
        (("--host", "192.0.2.1", "--token", TOKEN), "Cannot assign requested address"),
    ],
    ids=["no token", "no token for a name", "port", "address"],
)
def test_refused_options_are_one_line_of_advice(url, monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["reliq", "web", "--url", url, *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()

    assert (ended.value.code, told.out) == (2, "")
    assert len(told.err.splitlines()) == 1
    assert said in told.err


def test_missing_extra_is_one_line_that_says_what_to_install(start, tmp_path):
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module named starlette', name='starlette')")
    process = start(PYTHONPATH=str(tmp_path))
    _, errors = process.communicate(timeout=LIMIT)

    assert process.returncode == 2
    assert "pip install 'anyio>=" in errors
    assert len(errors.splitlines()) == 1
