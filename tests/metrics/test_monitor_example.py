"""The README's one command shows the demo's figures in a Prometheus."""

import os
import re
import shutil
import signal
import subprocess
import sys

from panels import ROOT
from patience import Prometheus, eventually, scrape, value
from required import must_run_in_ci


def test_the_demos_figures_reach_a_prometheus():
    if shutil.which("prometheus") is None:
        must_run_in_ci("Prometheus is not installed (Debian: apt-get install prometheus)")
    environment = {name: text for name, text in os.environ.items() if name != "RELIQ_URL"}
    command = [sys.executable, str(ROOT / "examples" / "monitor.py")]

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = iter(process.stdout.readline, "Ctrl-C ends it.\n")
        places = re.findall(r"http://127\.0\.0\.1:(\d+)/(metrics|alerts)", "".join(told))
        ports = {page: int(port) for port, page in places}
        prometheus = Prometheus(ports["alerts"])
        eventually(lambda: prometheus.ask('reliq_acked_total{queue="demo"} > 5'), "errands are handled and scraped")
        counted = value(scrape(ports["metrics"]), "reliq_acked_total", queue="demo")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)

    assert counted > 5
    assert process.returncode == 0
