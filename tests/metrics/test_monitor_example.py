"""The single command in the README shows the data of the dashboard's first screen in a Prometheus."""

import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import takewhile
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from panels import DASHBOARD, ROOT
from patience import Prometheus, scrape, value
from required import must_run_in_ci
from waiting import eventually

FIRST_SCREEN = takewhile(lambda panel: panel["type"] != "row", DASHBOARD["panels"])


@pytest.mark.slow
def test_figures_of_the_demo_reach_prometheus():
    if shutil.which("prometheus") is None:
        must_run_in_ci("Prometheus is not installed (Debian: apt-get install prometheus)")
    environment = {name: text for name, text in os.environ.items() if name != "RELIQ_URL"}
    command = [sys.executable, str(ROOT / "examples" / "monitor.py")]

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = "".join(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        links = re.findall(r"http://\S+", told)
        worker, _, shop, prometheus_port = (urlsplit(link).port for link in links[:4])
        prometheus = Prometheus(prometheus_port)
        eventually(lambda: prometheus.ask('reliq_acked_total{queue="demo"} > 5'), "errands are handled and scraped")
        eventually(lambda: len(prometheus.ask('up{cluster="demo"} == 1')) == 3, "Prometheus scrapes all three")
        for port, name, labels in (
            (worker, "reliq_acked_total", {}),
            (shop, "reliq_publish_messages_total", {"outcome": "published"}),
        ):
            eventually(lambda: (value(scrape(port), name, queue="demo", **labels) or 0) > 5, f"{name} is served")  # noqa: B023
        answers = [urlopen(link, timeout=30).status for link in links]
        queries = [query for link in links for query in parse_qs(urlsplit(link).query).get("g0.expr", ())]
        for query in queries:
            eventually(lambda query=query: prometheus.ask(query), f"the query has something to show: {query}")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)

    assert (len(queries), set(answers)) == (sum(len(panel["targets"]) for panel in FIRST_SCREEN), {200})
    assert process.returncode == 130
