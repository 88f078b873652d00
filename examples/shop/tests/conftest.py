"""Fixtures: each test has its own Redis, its own database, and a mail server that records mails."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from shop.database import open_database
from shop.jobs import consumer
from shop.web import app

from reliq import Relay
from reliq.testing import DrainResult, Reliq


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """Return the URL of an empty database."""
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = open_database(url)
    yield url
    engine.dispose()


@pytest.fixture
def shop(database: str) -> TestClient:  # noqa: ARG001  its requests need it
    """Return a client that sends requests to the shop."""
    return TestClient(app)  # without its lifespan, which opens another database


@pytest.fixture
def mails() -> Iterator[SimpleNamespace]:
    """
    Return a mail server.

    `server` is a client of it, for handlers. `inbox` has the received mails. `answers` are the status codes to answer first;
    after them, the server answers 200.
    """
    inbox: list[Any] = []
    answers: list[int] = []

    def receive(request: httpx.Request) -> httpx.Response:
        if answers:
            return httpx.Response(answers.pop(0))
        inbox.append(json.loads(request.content))
        return httpx.Response(200)

    with httpx.Client(base_url="http://mails", transport=httpx.MockTransport(receive)) as server:
        yield SimpleNamespace(server=server, inbox=inbox, answers=answers)


@pytest.fixture
def work(reliq: Reliq, database: str, mails: SimpleNamespace) -> Callable[..., DrainResult]:
    """Return a function that moves the outbox to Redis and runs all due messages."""
    return lambda **how: reliq.drain(consumer, outbox=Relay(database), state=mails.server, **how)
