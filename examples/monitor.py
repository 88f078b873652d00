"""
Watch the demo's queue in a Prometheus: a worker of two processes, errands published all the time, our alert rules.

    python examples/monitor.py [SECONDS]

It needs `prometheus` on PATH (Debian: apt-get install prometheus), and goes on until Ctrl-C or SIGTERM, or for SECONDS.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from stage import a_redis, missing, running

from reliq.testing.server import free_port

HERE = Path(__file__).parent
RULES = HERE.parent / "grafana" / "rules.yml"
GRAPHS = {
    "messages by state": 'reliq_messages{queue="demo"}',
    "acked and nacked a second": "rate(reliq_acked_total[1m]) or rate(reliq_nacked_total[1m])",
    "alerts that are pending or fire": "ALERTS",
    "lag, 99 %": "histogram_quantile(0.99, sum by (le) (rate(reliq_lag_seconds_bucket[1m])))",
}


def prometheus(folder: Path, worker_port: int, port: int) -> list[str]:
    """Return the command of a Prometheus that scrapes the worker every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "reliq", "static_configs": [{"targets": [f"127.0.0.1:{worker_port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    data = f"--storage.tsdb.path={folder / 'data'}"
    return ["prometheus", f"--config.file={folder / 'prometheus.yml'}", data, f"--web.listen-address=127.0.0.1:{port}"]


def main() -> None:
    """Run until a signal comes, or the time is over."""
    if shutil.which("prometheus") is None:
        missing("the program prometheus", "apt-get install prometheus (on Debian)")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else None
    metrics_port = free_port()
    port = free_port()
    worker = ["worker", "reliq.cli.demo_jobs:consumer", "--processes", "2", "--metrics-port", str(metrics_port)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliq-")))
        stack.enter_context(a_redis())
        for command in (
            [sys.executable, "-m", "reliq", *worker],
            [sys.executable, str(HERE / "publish_errands.py")],
            prometheus(folder, metrics_port, port),
        ):
            stack.enter_context(running(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        print(f"The worker's metrics: http://127.0.0.1:{metrics_port}/metrics")
        print(f"Prometheus: http://127.0.0.1:{port}/")
        for title, query in GRAPHS.items():
            print(f"  {title}: http://127.0.0.1:{port}/graph?g0.expr={quote(query)}&g0.tab=0&g0.range_input=5m")
        print("Ctrl-C ends it.", flush=True)
        threading.Event().wait(seconds)


if __name__ == "__main__":
    main()
