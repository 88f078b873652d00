"""The limit: reliq's own scripts, a SET and a list, driven by one client with nothing around them."""

import json
import time

import redis

from benchmarks.peers import kit
from reliq.keys import Keys, new_id, token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.settings import QueueSettings, milliseconds
from reliq.wire_format import envelope_rest

CALL_SIZE = 100
LEASE_MS = 30_000
KEYS = Keys("bare")
SETTINGS = QueueSettings()


def one(count):
    client = redis.Redis.from_url(kit.URL)
    return kit.one(lambda _body: client.set("bare", b"x" * 100), count)


def bulk(count):
    client = Client(Connection.to(kit.URL).wire())
    value = envelope_rest(SETTINGS.retries) + json.dumps(kit.BODY).encode()
    lane = token()
    ttl_ms = milliseconds(SETTINGS.ttl)
    began = time.perf_counter()
    for number in range(1, count // CALL_SIZE + 1):
        batch = [(new_id(), value) for _ in range(CALL_SIZE)]
        client.run(transitions.publish(KEYS, batch, CallNumber(lane, number), ttl_ms=ttl_ms, retries=SETTINGS.retries))
    return time.perf_counter() - began


def drain(count):
    bulk(count)
    client = Client(Connection.to(kit.URL).wire())
    lane = token()
    began = time.perf_counter()
    for number in range(1, count // CALL_SIZE + 1):
        call_number = CallNumber(lane, number)
        claimed = client.run(transitions.claim(KEYS, call_number, limit=CALL_SIZE, lease_ms=LEASE_MS)).claimed
        ids = [claim.id for claim in claimed]
        client.run(transitions.bodies(KEYS, ids, max_body=SETTINGS.max_body))
        client.run(transitions.ack(KEYS, [(claim, None) for claim in claimed]))
    return time.perf_counter() - began


def slow(count):
    client = redis.Redis.from_url(kit.URL)
    kit.slowly(lambda body: client.lpush("bare", json.dumps(body)), count)


def work(processes):
    """Wait for what `slow` pushes; the other steps need no worker."""
    client = redis.Redis.from_url(kit.URL)
    while True:
        if popped := client.blpop(["bare"], timeout=1):
            kit.note(json.loads(popped[1]))
