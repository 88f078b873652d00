"""The single command in the README shows the demo's metrics in a Prometheus."""

import os
import re
import shutil
import signal
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from panels import ROOT
from patience import Prometheus, scrape, value
from required import must_run_in_ci
from waiting import eventually


@pytest.mark.slow
def test_figures_of_the_demo_reach_prometheus():
    if shutil.which("prometheus") is None:
        must_run_in_ci("Prometheus is not installed (Debian: apt-get install prometheus)")
    environment = {name: text for name, text in os.environ.items() if name != "RELIQ_URL"}
    command = [sys.executable, str(ROOT / "examples" / "monitor.py")]

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = "".join(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        links = re.findall(r"http://\S+", told)
        ports = {link.path: link.port for link in map(urlsplit, links)}
        prometheus = Prometheus(ports["/"])
        eventually(lambda: prometheus.ask('reliq_acked_total{queue="demo"} > 5'), "errands are handled and scraped")
        counted = value(scrape(ports["/metrics"]), "reliq_acked_total", queue="demo")
        answers = [urlopen(link, timeout=30).status for link in links]
        queries = [query for link in links for query in parse_qs(urlsplit(link).query).get("g0.expr", ())]
        for query in set(queries) - {"ALERTS"}:
            eventually(lambda query=query: prometheus.ask(query), f"the graph of {query} has something to show")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)

    assert counted > 5
    assert (len(queries), set(answers)) == (4, {200})
    assert process.returncode == 130
