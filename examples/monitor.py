"""
Watch the demo's queue in Prometheus, without Docker.

    python examples/monitor.py [SECONDS]

The program starts a worker with two processes, an exporter, a publisher, and Prometheus with reliq's alert rules. For each
panel of the dashboard's first screen, it prints a link to Prometheus with the panel's query. You need `prometheus` on PATH
(Debian: apt-get install prometheus). The program runs until Ctrl-C or SIGTERM, or for SECONDS.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

from stage import a_redis, missing, running

from reliq.testing.server import free_port

HERE = Path(__file__).parent
GRAFANA = HERE.parent / "grafana"
#: Values of the dashboard's variables.
VARIABLES = {"$cluster": "demo", "$job": ".*", "$instance": ".*", "$queue": ".*", "$__rate_interval": "1m"}


def prometheus(folder: Path, targets: list[str], port: int) -> list[str]:
    """Return the command that starts a Prometheus, which scrapes the targets every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(GRAFANA / "rules.yml")],
        "scrape_configs": [
            {"job_name": "reliq", "static_configs": [{"targets": targets, "labels": {"cluster": "demo"}}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    data = f"--storage.tsdb.path={folder / 'data'}"
    return ["prometheus", f"--config.file={folder / 'prometheus.yml'}", data, f"--web.listen-address=127.0.0.1:{port}"]


def print_links(port: int) -> None:
    """Print a link for each query of the first screen. A table has a query for each column."""
    panels = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    for panel in takewhile(lambda panel: panel["type"] != "row", panels):
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            title = f"{panel['title']}, {target['legendFormat']}" if panel["type"] == "table" else panel["title"]
            tab = int(panel["type"] != "timeseries")
            print(f"  {title}: http://127.0.0.1:{port}/graph?g0.expr={quote(query)}&g0.tab={tab}&g0.range_input=5m")


def main() -> None:
    """Run all programs until a signal comes, or the time is over."""
    if shutil.which("prometheus") is None:
        missing("the program prometheus", "apt-get install prometheus (on Debian)")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else None
    port, worker, exporter, publisher = (free_port() for _ in range(4))
    reliq = [sys.executable, "-m", "reliq"]
    demo = ["worker", "reliq.cli.demo_jobs:consumer", "--processes", "2", "--metrics-port", str(worker)]
    targets = [f"127.0.0.1:{target}" for target in (worker, exporter, publisher)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliq-")))
        stack.enter_context(a_redis())
        for command in (
            [*reliq, *demo],
            [*reliq, "exporter", "--port", str(exporter)],
            [sys.executable, str(HERE / "publish_errands.py"), "20", targets[-1]],
            prometheus(folder, targets, port),
        ):
            stack.enter_context(running(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        print("Metrics of the worker, the exporter and the publisher:")
        for target in targets:
            print(f"  http://{target}/metrics")
        print(f"Prometheus: http://127.0.0.1:{port}/")
        print_links(port)
        print("Ctrl-C ends it.", flush=True)
        threading.Event().wait(seconds)


if __name__ == "__main__":
    main()
