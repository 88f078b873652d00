r"""
The services of examples/compose.yaml without Docker: those whose programs this machine has, as the file has them.

    PYTHONPATH=tests unshare --map-root-user --net --mount --pid --fork --kill-child \
      python tests/metrics/composed.py FOLDER

Its namespaces have a loopback alone, where a name server of ours answers as Docker's does: with an address for each container
of a service. FOLDER becomes what the containers hold. It prints as JSON whom Prometheus found, and how each service ended.
"""

import fcntl
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

from compose_file import EXAMPLES, SERVICES, VOLUMES, health_check, mounts
from patience import Prometheus, eventually, get

#: One worker answers at three addresses, which are all that Prometheus sees of a service scaled to three.
ADDRESSES = {
    "redis": ["127.0.0.1"],
    "worker": ["127.0.0.2", "127.0.0.3", "127.0.0.4"],
    "exporter": ["127.0.0.5"],
}
NAME_SERVER = "127.0.0.53"
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
#: The entry points of the images that have one.
ENTRYPOINTS = {"prometheus": ["prometheus"]}


def bring_up_loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def dns_answer(query):
    """Return the addresses of a query's name, none when it asks for another type, or that there is no such name."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    known = ADDRESSES.get(".".join(labels))
    addresses = known if known and kind == 1 else []
    header = query[:2] + struct.pack("!5H", 0x8580 if known else 0x8583, 1, len(addresses), 0, 0)
    records = [b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 1, 4) + socket.inet_aton(one) for one in addresses]
    return header + query[12 : at + 5] + b"".join(records)


def serve_names(folder):
    """Have every program here ask us for addresses."""
    (folder / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions ndots:0\n")
    subprocess.run(["mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf"], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((NAME_SERVER, 53))

    def serve():
        while True:
            query, whence = server.recvfrom(512)
            server.sendto(dns_answer(query), whence)

    threading.Thread(target=serve, daemon=True).start()


class Container:
    """A service under way, with a folder of its own for what is mounted in it."""

    def __init__(self, name, folder):
        self.name, self.root = name, folder / name
        self.environment = {**os.environ, **SERVICES[name].get("environment", {})}
        for place, source in mounts(name).items():
            self._mount(self.root / place[1:], source)
        work = self.root / "app"
        work.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(self._command(), cwd=work, env=self.environment, stdout=log, stderr=log)

    def _mount(self, place, source):
        place.parent.mkdir(parents=True, exist_ok=True)
        if source in VOLUMES:
            place.mkdir()
            return
        text = (EXAMPLES / source).read_text("utf-8")
        # Prometheus looks more often than a person needs.
        place.write_text(re.sub(r"(_interval: )\d+s", r"\g<1>1s", text))

    def _command(self):
        """Return its command, with the paths in its container where they lie here."""
        words = ENTRYPOINTS.get(self.name, []) + shlex.split(SERVICES[self.name]["command"])
        return [re.sub(r"(?<==)/", f"{self.root}/", word) for word in words]

    def is_healthy(self):
        """Make its health check; one that asks for a page is asked by us: a start of wget or reliq costs more."""
        words = health_check(self.name)[1:]
        if words[0] == "wget":
            page = urlsplit(words[-1])
            return get(page.port, page.path)[0] == 200
        if words[:3] == ["reliq", "health", "live"]:
            return get(int(words[-1]), "/live")[0] == 200
        return subprocess.run(words, env=self.environment, capture_output=True, check=False).returncode == 0


def stop(containers):
    """Stop them as Docker does, and return their exit codes."""
    for one in containers:
        one.process.terminate()
    return {one.name: one.process.wait(60) for one in containers}


def targets(prometheus):
    """Return the targets that answer a scrape: [instance, job, cluster]."""
    active = (prometheus.api("targets", state="active") or {"activeTargets": []})["activeTargets"]
    labels = [one["labels"] for one in active if one["health"] == "up"]
    return sorted([one["instance"], one["job"], one["cluster"]] for one in labels)


def main(folder):
    """Start the services in the order of their dependencies, look at them, and stop them."""
    bring_up_loopback()
    serve_names(folder)
    redis = Container("redis", folder)
    eventually(redis.is_healthy, "Redis is healthy")
    others = [Container(name, folder) for name in ("worker", "exporter", "shop", "web", "prometheus")]
    prometheus = Prometheus(9090)
    expected = sum(len(ADDRESSES[name]) for name in ("worker", "exporter"))
    eventually(lambda: len(targets(prometheus)) == expected, "every address is scraped")
    eventually(lambda: prometheus.ask('reliq_acked_total{queue="demo"} > 0'), "what the shop publishes is handled")
    found = {
        "targets": targets(prometheus),
        "alertmanagers": [one["url"] for one in prometheus.api("alertmanagers")["activeAlertmanagers"]],
        "unhealthy": [one.name for one in (redis, *others) if not one.is_healthy()],
        "ended": stop(others) | stop([redis]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
