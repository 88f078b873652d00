"""Clients that never finish a request delay no other client."""

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest
from patience import get
from waiting import eventually

from reliq.metrics import serving as endpoint_module
from reliq.metrics.exposition import Page
from reliq.metrics.serving import CONNECTION_LIMIT, EXHAUSTED_SECONDS, Endpoint


@pytest.fixture
def endpoint():
    with Endpoint(0, None, page=Page(), live=str, ready=str) as one:
        yield one


def connected(stack, port):
    """Open a connection and send the beginning of a request."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    client.sendall(b"G")
    return client


def is_cut_off(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def serving():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_probe_beside_many_slow_clients_is_answered_by_few_threads(endpoint):
    before = serving()
    with ExitStack() as stack:
        slow = [connected(stack, endpoint.port) for _ in range(3 * CONNECTION_LIMIT)]

        assert get(endpoint.port, "/live") == (200, "ok\n")

        assert all(map(is_cut_off, slow[: 2 * CONNECTION_LIMIT]))
        eventually(lambda: serving() - before <= CONNECTION_LIMIT, "the threads of those that were cut off end")


def test_request_that_drips_is_cut_off_at_its_deadline(endpoint, monkeypatch):
    monkeypatch.setattr(endpoint_module, "REQUEST_SECONDS", 1.0)
    with ExitStack() as stack:
        client = connected(stack, endpoint.port)
        with pytest.raises(ConnectionError):
            eventually(lambda: client.sendall(b"E"), "the server closes the connection")


def test_accept_without_a_free_descriptor_pauses_between_tries(endpoint, monkeypatch):
    eventually(lambda: not serving(), "no thread of an earlier test closes a descriptor")
    tries, accept = [], Endpoint.get_request
    counted = lambda server: tries.append(time.monotonic()) or accept(server)  # noqa: E731
    monkeypatch.setattr(Endpoint, "get_request", counted)
    with ExitStack() as stack:
        client = stack.enter_context(socket.socket())
        client.settimeout(60)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(client.fileno())  # a new descriptor gets the lowest free number
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limit[1]))
        try:
            client.connect(("127.0.0.1", endpoint.port))
            eventually(lambda: len(tries) >= 4, "it tries again")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        client.sendall(b"GET /live HTTP/1.0\r\n\r\n")

        assert client.recv(100).startswith(b"HTTP/1.0 200")
        assert all(later - sooner >= EXHAUSTED_SECONDS for sooner, later in pairwise(tries[:4]))
