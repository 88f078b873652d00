"""Write the programs of a page into a folder, and run the page's commands there."""

import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import redis
import yaml
from pages import EXAMPLE, ROOT, programs
from programs import python
from written import imported_from, parse, write_down

from reliq.cli.app import main

#: Commands that run until they are stopped, or bind a port; other tests run them.
ONLY_PARSED = {"watch", "exporter", "health", "bench", "web"}
#: Requests the health page of the web pages mounted in an ASGI application.
ASK_HEALTH = """
import asyncio, importlib, sys
import httpx
module, _, name = sys.argv[1].partition(":")
transport = httpx.ASGITransport(getattr(importlib.import_module(module), name))
async def ask():
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        print((await client.get("/ops/reliq/health")).text, (await client.get("/ops/reliq/")).status_code)
asyncio.run(ask())
"""
#: The server's version has a known vulnerability, so `doctor` exits with 1.
EXITS = {"doctor": (0, 1)}
#: The database of the test kit, which empties it. All other tests use database 0.
KIT_DATABASE = 6


@pytest.fixture
def shop(tmp_path, url, monkeypatch, capsys):
    """Write the programs of the example and of a page into a folder; return a function that runs a command there."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.chdir(tmp_path)

    def written(page):
        Path("shop").mkdir()
        example = programs(EXAMPLE)
        used = {name: example[name] for name in ("shop/queues.py", "shop/jobs.py")}
        for name, text in (used | programs(page)).items():
            Path(name).write_text(text)
        return run

    def run(line):
        words = shlex.split(line)
        if words[:2] == ["docker", "compose"]:
            composed(*words[2:])
            return ""
        if words[0] in ("docker", "kubectl", "sudo") or "kubectl" in words:  # they need root, a cluster or an engine
            assert [word for word in words if word.startswith("examples/") and not (ROOT / word).exists()] == []
            return ""
        if words[0] == "uvicorn":
            words = ["python", "-c", ASK_HEALTH, *words[1:]]
        if words[1] in ONLY_PARSED or "--metrics-port" in words:
            parse(words[1:])
            return ""
        code, out, error = start(*words) if words[0] == "python" or "worker" in words else typed(*words)
        assert code in EXITS.get(words[1], (0,)), (line, out, error)
        return out

    def composed(file_option, file, action, *words):
        """Check a Docker Compose command: its file and services exist, and it runs a valid command."""
        services = yaml.safe_load((ROOT / file).read_text("utf-8"))["services"]
        scaled = {word.partition("=")[0] for option, word in pairwise(words) if option == "--scale"}
        assert (file_option, scaled - set(services)) == ("-f", set())
        if action == "exec":
            service, _, *rest = words
            assert service in services
            parse(rest)

    def start(*words):
        words = ("python", "-m", *words) if words[0] == "reliq" else words
        burst = ["--burst-delayed"] if "worker" in words and "--burst" not in words else []
        done = python(*words[1:], *burst)
        return done.returncode, done.stdout, done.stderr

    def typed(*words):
        """Run the command in this process, which is much faster than a new process."""
        assert words[0] == "reliq", words
        monkeypatch.setattr(sys, "argv", [*words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return written


@pytest.fixture
def kit_url(redis_server):
    """An empty database of the server under test, for the test kit."""
    url = f"redis://127.0.0.1:{redis_server.port}/{KIT_DATABASE}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def written(tmp_path, url, monkeypatch):
    """Write the programs of a page into a folder, and import from that folder."""
    monkeypatch.setenv("RELIQ_URL", url)

    def write(name):
        write_down(ROOT / "docs" / name, tmp_path)
        return ROOT / "docs" / name

    with imported_from(tmp_path):
        yield write
