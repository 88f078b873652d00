"""The README's one command shows the demo's figures in a Prometheus."""

import os
import re
import shutil
import signal
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

from panels import ROOT
from patience import Prometheus, eventually, get, scrape, value
from required import must_run_in_ci


def test_the_demos_figures_reach_a_prometheus():
    if shutil.which("prometheus") is None:
        must_run_in_ci("Prometheus is not installed (Debian: apt-get install prometheus)")
    environment = {name: text for name, text in os.environ.items() if name != "RELIQ_URL"}
    command = [sys.executable, str(ROOT / "examples" / "monitor.py")]

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = "".join(iter(process.stdout.readline, "Ctrl-C ends it.\n"))
        links = [urlsplit(link) for link in re.findall(r"http://\S+", told)]
        ports = {link.path: link.port for link in links}
        prometheus = Prometheus(ports["/alerts"])
        eventually(lambda: prometheus.ask('reliq_acked_total{queue="demo"} > 5'), "errands are handled and scraped")
        counted = value(scrape(ports["/metrics"]), "reliq_acked_total", queue="demo")
        answers = [get(link.port, f"{link.path}?{link.query}")[0] for link in links]
        queries = [query for link in links for query in parse_qs(link.query).get("g0.expr", ())]
        for query in queries:
            eventually(lambda query=query: prometheus.ask(query), f"the graph of {query} has something to show")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)

    assert counted > 5
    assert (len(queries), set(answers)) == (3, {200})
    assert process.returncode == 0
