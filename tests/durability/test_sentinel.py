"""A primary is killed, three sentinels promote its replica, and all clients continue with the same URL."""

import signal
import subprocess
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
import redis
from failover_jobs import NUMBERS
from ports import free_port
from waiting import eventually
from worker_process import Worker, environment_for

from reliq import Durability, PublishFailed, Queue

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SERVICE = "shop"
SECRET, SENTINEL_SECRET = "s3cret", "s3ntinel"
WAIT = Durability.replicas(1, timeout=0.2)

#: A sentinel that was held up itself does nothing for 30 s.
FAILOVER_SECONDS = 75.0

SENTINEL = f"""
bind 127.0.0.1
requirepass {SENTINEL_SECRET}
sentinel sentinel-pass {SENTINEL_SECRET}
sentinel monitor {SERVICE} 127.0.0.1 PRIMARY 2
sentinel auth-pass {SERVICE} {SECRET}
sentinel down-after-milliseconds {SERVICE} 2500
sentinel failover-timeout {SERVICE} 5000
"""


@pytest.fixture(scope="module")
def servers(server_path, replicated):
    """A primary and a replica with a password."""
    primary, replica = replicated(server_path)
    for one in (replica, primary):
        with redis.Redis.from_url(one.url) as client:
            client.config_set("masterauth", SECRET)
            client.config_set("requirepass", SECRET)
    return primary, replica


@pytest.fixture(scope="module")
def sentinels(servers, server_path, tmp_path_factory):
    """Return the URL of three sentinels that know each other and the replica."""
    ports = []
    with ExitStack() as stack:
        for _ in range(3):
            folder, port = tmp_path_factory.mktemp("sentinel"), free_port()
            settings = folder / "sentinel.conf"
            common = SENTINEL.replace("PRIMARY", str(servers[0].port))
            settings.write_text(f"port {port}\ndir {folder}{common}")
            command = [str(server_path), str(settings), "--sentinel"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ports.append(port)
        for port in ports:
            eventually(lambda port=port: knows_everybody(port), "the sentinels know each other")
        places = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield f"redis+sentinel://:{SECRET}@{places}/{SERVICE}/0?sentinel_password={SENTINEL_SECRET}"


def knows_everybody(port):
    """Return whether a sentinel has found the other two and the replica."""
    try:
        with redis.Redis(port=port, password=SENTINEL_SECRET) as client:
            seen = client.sentinel_master(SERVICE)
    except redis.RedisError:
        return False
    return (seen["num-other-sentinels"], seen["num-slaves"], seen["flags"]) == (2, 1, "master")


@pytest.mark.parametrize("by", ["URL", "client"])
def test_queue_publishes_and_receives_by_sentinel(sentinels, call, by):
    places = sentinels.partition("@")[2].partition("/")[0].split(",")
    theirs = redis.sentinel.Sentinel(
        [place.split(":") for place in places], sentinel_kwargs={"password": SENTINEL_SECRET}
    )
    client = theirs.master_for(SERVICE, password=SECRET, decode_responses=True)
    queue = Queue("q", url=sentinels if by == "URL" else client)

    receipt = call(queue, "publish", {"a": 1}, durability=Durability.replicas(1, timeout=20))

    assert (receipt.status, receipt.durable) == ("published", True)
    with queue.receive() as [job]:
        assert (job.id, job.body) == (receipt.id, {"a": 1})
    queue.close()
    for one in (client, *theirs.sentinels):
        one.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((f":{SECRET}@", ":wr0ng@"), "Redis refused this user, password or database"),
        ((SENTINEL_SECRET, "wr0ng"), "No master found"),
        ((f"/{SERVICE}/", "/another/"), "No master found for 'another'"),
    ],
    ids=["password", "password of sentinels", "service"],
)
def test_wrong_sentinel_url_is_refused_without_showing_a_password(sentinels, call, change, said):
    queue = Queue("q", url=sentinels.replace(*change))

    with pytest.raises(PublishFailed, match=said) as caught:
        call(queue, "publish", {})

    assert caught.value.outcome == "refused"
    texts = f"{caught.value} {caught.value.__cause__} {queue.connection().name}"
    assert not any(secret in texts for secret in (SECRET, SENTINEL_SECRET, "wr0ng"))
    queue.close()


class Publisher(threading.Thread):
    """Publishes until it is stopped; repeats failed publishes with the same id."""

    def __init__(self, url, durability):
        super().__init__(daemon=True)
        self._queue, self._durability = Queue(NUMBERS.name, int, url=url), durability
        self._over = threading.Event()
        self.receipts = []

    def run(self):
        while not self._over.wait(0.002):
            number = len(self.receipts)
            with suppress(PublishFailed):
                self.receipts.append(
                    self._queue.publish(number, id=f"{self.name}-{number}", durability=self._durability)
                )
        self._queue.close()

    def stop(self):
        self._over.set()
        self.join()

    def confirmed(self):
        return {one.id for one in list(self.receipts) if one.durable}


@pytest.fixture
def worker(sentinels, tmp_path):
    """A `reliq worker` of two processes with a Sentinel URL, and the file to which its handlers write."""
    notes = tmp_path / "notes"
    environment = environment_for(HERE, sentinels) | {"NOTES": str(notes)}
    with closing(Worker("failover_jobs:consumer", HERE, environment, "--processes", "2", "--grace", "5")) as worker:
        yield worker, notes


def noted(notes):
    """Return the ids that were handled so far."""
    return set(notes.read_text().split()) if notes.exists() else set()


@pytest.mark.timeout(240)
def test_failover_by_sentinel_loses_no_confirmed_message(servers, sentinels, worker):
    worker, notes = worker
    publishers = [Publisher(sentinels, durability) for durability in (WAIT, Durability.NONE)]
    careful = publishers[0]
    for one in publishers:
        one.start()
    eventually(lambda: len(careful.confirmed()) >= 100, "100 messages are confirmed")
    eventually(lambda: len(noted(notes)) >= 100, "100 messages are handled")

    servers[0].kill()
    before = [len(one.receipts) for one in publishers]
    for one, count in zip(publishers, before, strict=True):
        # One reply may have been in transit when the primary died.
        eventually(lambda one=one, count=count: len(one.receipts) >= count + 5, "publishing goes on", FAILOVER_SECONDS)
    for one in publishers:
        one.stop()

    queue = Queue(NUMBERS.name, int, url=sentinels)
    eventually(lambda: queue.counts().alive == 0, "everything is handled", FAILOVER_SECONDS)
    counts, there = queue.counts(), noted(notes)
    queue.close()
    seen = [psutil.Process(worker.process.pid), *worker.children()]
    titles = [word for one in seen for word in one.cmdline()]
    assert len(seen) == 3
    assert careful.confirmed() - there == set()
    assert counts.missing == 0
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.lines
    shown = " ".join([*worker.lines, *titles])
    assert [secret for secret in (SECRET, SENTINEL_SECRET) if secret in shown] == []
