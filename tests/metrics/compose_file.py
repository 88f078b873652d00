"""examples/compose.yaml and the files that it names, as Docker Compose reads them."""

import json
import re
from pathlib import Path

import dockerfile
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Without variables in the environment each has its default.
_TEXT = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (EXAMPLES / "compose.yaml").read_text("utf-8"))
COMPOSE = yaml.safe_load(_TEXT)
SERVICES = COMPOSE["services"]
VOLUMES = COMPOSE["volumes"]


def mounts(name):
    """Where each file, folder and volume of a service lies in its container: {place: source}."""
    return {place: source for source, place, *_ in (one.split(":") for one in SERVICES[name].get("volumes", ()))}


def health_check(name):
    """Return the words of a service's health check; one without a check of its own has its image's."""
    if "healthcheck" in SERVICES[name]:
        return SERVICES[name]["healthcheck"]["test"]
    return ["CMD", *json.loads(dict(dockerfile.stages()[-1])["HEALTHCHECK"].partition("CMD ")[2])]
