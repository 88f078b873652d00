"""Redis' append-only file is enough: cut at any byte it holds whole messages; evicted messages are counted."""

import random

import pytest
import redis

from reliq import Consumer, WorkerSettings
from reliq.testing.server import EmbeddedRedis
from tests.harness.chaos.scan import take

pytestmark = pytest.mark.slow

CUTS = 12


def test_append_only_file_cut_at_any_byte_holds_whole_messages(own_server, server_path, tmp_path, queue_at):
    first = own_server(appendfsync="no")  # each command is written to the file, and a disk that hangs delays none
    queue = queue_at(first.url)
    for number in range(150):
        queue.publish(str(number), delay=60 * (number % 2))
    with queue.receive(limit=20) as jobs:
        for job in jobs[:5]:
            job.nack(delay=60)
    logs = {path.relative_to(first.folder): path.read_bytes() for path in first.folder.rglob("*aof*") if path.is_file()}
    longest = max(logs, key=lambda name: len(logs[name]))
    chance = random.Random(1)

    for cut in range(CUTS):
        folder = tmp_path / str(cut)
        for name, content in logs.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            kept = chance.randrange(len(content)) if name == longest else len(content)
            (folder / name).write_bytes(content[:kept])
        options = {"appendonly": "yes", "aof-load-truncated": "yes"}
        with EmbeddedRedis(server=server_path, options=options, folder=folder) as server:
            client = redis.Redis(unix_socket_path=str(server.socket))
            look, start = take(client, queue.keys), queue.keys.msg("")
            bodies = {key.decode().removeprefix(start) for key in client.scan_iter(f"{start}*", count=1000)}
            assert sorted(look.alive) == sorted(set(look.alive)) == sorted(bodies) == sorted(look.counts)
            assert queue_at(server.url).counts().missing == 0
            client.close()


def test_bodies_that_redis_evicted_end_as_expired_each_in_the_account(own_server, queue_at):
    server = own_server(maxmemory="6mb", maxmemory_policy="volatile-lru", appendonly="no")
    queue = queue_at(server.url)
    for _ in range(8):
        queue.publish_many(["x" * 2000] * 500)
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        evicted = client.info("stats")["evicted_keys"]
    done, consumer = [], Consumer()
    consumer.handler(queue)(done.append)

    consumer.drain(WorkerSettings(allow_eviction=True), delayed=True, raise_errors=False)

    totals = queue.counts().totals
    assert evicted > 100
    assert len(done) == totals["acked"] > 100
    assert totals["expired"] >= evicted - 10  # Redis may also evict a lane or two
    assert (queue.counts().missing, queue.counts().alive) == (0, 0)
