"""The tutorial as a reader goes through it: each command is typed, and each text that follows is seen."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from pages import BLOCK
from waiting import eventually
from written import run_module, run_tests

from reliq import Admin, Queue
from reliq.cli.app import main

#: A reader's machine is prepared by these; here the server, the environment and the folder are there.
PREPARED = (
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install 'reliq-queue[testing]' pytest",
    "redis-server --port 6390 --appendonly yes --daemonize yes",
    "export RELIQ_URL=redis://127.0.0.1:6390/0",
    "mkdir shop",
    ". .venv/bin/activate && export RELIQ_URL=redis://127.0.0.1:6390/0",
)


class Reader:
    """Types what the tutorial says, with more slots than it has: a test is in a hurry, a reader has to find the process."""

    def __init__(self, folder, url, kit_url, monkeypatch, capsys):
        self.url, self.kit_url, self.monkeypatch, self.capsys = url, kit_url, monkeypatch, capsys
        self.log, self.said, self.seen, self.prepared = folder / "worker.log", "", 0, []
        self.worker, self.killed = None, "nobody"
        self.mails = Queue("mails", url=url)

    def types(self, line):
        words = shlex.split(line)
        self.capsys.readouterr()
        if line in PREPARED:
            self.prepared.append(line)
        elif words[:2] == ["reliq", "worker"]:
            self.starts_the_worker(words)
        elif words[0] == "reliq":
            self.asks(words)
        elif words[:3] == ["python", "-m", "pytest"]:
            assert run_tests(*words[3:], server=self.kit_url) == 0
        elif words[0] == "python":
            run_module(words[2])
        elif words[0] == "kill":
            self.killed = str(Admin(self.url).workers()[0].pid)
            os.kill(int(self.killed), 9)
        else:
            subprocess.run(words, check=True)
        self.said = self.capsys.readouterr().out

    def starts_the_worker(self, words):
        slots = words.index("--concurrency") + 1
        assert words[slots] == "4"
        words[slots] = "64"
        with self.log.open("w") as log:
            self.worker = subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=subprocess.STDOUT)

    def asks(self, words):
        if words[1] == "account":
            eventually(lambda: self.mails.counts().alive == 0, "the worker is quiet")
        self.monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, words

    def sees(self, text):
        """Find each line of `text`, in its order, in what was said last or in what the worker says."""
        if "How do you like it" in text:
            self.mails.reschedule("survey-ann", delay=0)  # a reader waits for twenty seconds
        text = text.replace("of 4 on redis://127.0.0.1:6390/0", f"of 64 on {self.url}").replace("4711", self.killed)
        wanted = re.compile(".*".join(map(as_pattern, text.strip().splitlines())), re.DOTALL)
        if not wanted.search(plain(self.said)):
            eventually(lambda: wanted.search(plain(self.log.read_text())), f"{text} (there was: {self.said})")


def as_pattern(line):
    return r"[^\n]*".join(re.escape(part) for part in plain(line).split("…"))


def plain(text):
    return re.sub(" +", " ", text)


def test_the_tutorial_goes_as_it_is_written(written, tmp_path, url, kit_url, monkeypatch, capsys):
    page = written("tutorial.md")
    reader = Reader(tmp_path, url, kit_url, monkeypatch, capsys)
    try:
        for language, block in BLOCK.findall(page.read_text("utf-8")):
            if language == "sh":
                for line in block.splitlines():
                    reader.types(line)
            elif language == "text":
                reader.sees(block)
    finally:
        if reader.worker:
            reader.worker.terminate()
            reader.worker.wait(60)

    assert tuple(reader.prepared) == PREPARED
    assert reader.worker.returncode == 0
