"""
Print the alert rules of grafana/rules.yml as a PrometheusRule.

    python examples/kubernetes/rules.py | kubectl apply -f -
    python examples/kubernetes/rules.py --without ReliqNoWorkers | kubectl apply -f -    # KEDA scales to zero
"""

import argparse
import re
import textwrap
from pathlib import Path

RULES = Path(__file__).parents[2] / "grafana" / "rules.yml"
HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: reliq
  labels: {app.kubernetes.io/part-of: reliq}
spec:
"""


def without(text: str, alert: str) -> str:
    """Return the rules without this alert; end the program if the rules have no alert of this name."""
    rest, count = re.subn(rf"^      - alert: {re.escape(alert)}\n(?:(?:        .*)?\n)*", "", text, flags=re.MULTILINE)
    if not count:
        raise SystemExit(f"no alert of {RULES} is called {alert}")
    return rest


def main() -> None:
    """Print the manifest."""
    parser = argparse.ArgumentParser(description="Print the alert rules of grafana/rules.yml as a PrometheusRule.")
    parser.add_argument("--without", action="append", default=[], metavar="ALERT", help="leave out this alert")
    text = RULES.read_text("utf-8")
    for alert in parser.parse_args().without:
        text = without(text, alert)
    print(HEAD + textwrap.indent(text[text.index("groups:") :], "  "), end="")


if __name__ == "__main__":
    main()
