"""The client of blocking code: the only place that makes a `Call` there."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from tenacity import Retrying

from reliq.call import Call, Command, Request, T
from reliq.client.errors import result, translated, unknown_script
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Observer, notify
from reliq.message import Confirmed
from reliq.retry import Tries
from reliq.transport.cluster import Wire


class Client:
    """Makes calls over one wire and tells the observers what happened."""

    def __init__(self, wire: Wire, observers: Sequence[Observer] = ()) -> None:
        self._wire = wire
        self.observers = observers

    def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """
        Make `request` and return its answer; while Redis is away, try again until `for_seconds` are over.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused, for good.
        """
        return self._try(lambda: self._read(request, self._exchange([request])[0]), for_seconds)

    def run_all(self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0) -> list[Any]:
        """Make `requests` in one round trip; what Redis refused is an exception in its place."""
        if not requests:
            return []
        replies = self._try(lambda: self._exchange(requests), for_seconds)
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(self._read(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """
        Make `request` and, on the same connection in the same round trip, `wait` for its confirmation.

        Returns:
            both answers; a wait that Redis refused is an exception in its place, for the request has been made.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused the request, for good.
        """
        return self._try(lambda: self._both(request, wait), for_seconds)

    def _both(self, request: Request[T], wait: Command[Confirmed]) -> tuple[T, Confirmed | Exception]:
        replies = self._exchange([request, wait])
        if unknown_script(replies[0]):
            replies = self._exchange([request, wait], in_full=True)
        answer = self._read(request, replies[0])
        try:
            return answer, self._read(wait, replies[1])
        except ReliqError as error:
            return answer, error

    def _try(self, once: Callable[[], T], for_seconds: float) -> T:
        began = time.monotonic()
        try:
            return once()
        except RedisUnavailableError as error:
            if not for_seconds:
                raise
            tries = Tries(for_seconds, error, time.monotonic() - began)
        try:
            return tries.of(Retrying)(once)
        except ReliqError as error:
            tries.mark(error)
            raise

    def _exchange(self, requests: Sequence[Request[Any]], *, in_full: bool = False) -> list[Any]:
        commands = [one.command_in_full if in_full else one.command for one in requests]
        try:
            return self._wire.exchange(commands)
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None

    def _read(self, request: Request[T], reply: Any) -> T:
        if unknown_script(reply) and isinstance(request, Call):
            reply = self._exchange([request], in_full=True)[0]
        answer = result(request, reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer
