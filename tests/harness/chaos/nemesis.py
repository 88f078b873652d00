"""The faults: one function for each kind, which does the harm, waits, and heals it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import redis

from reliq import transitions
from reliq.call import Call
from reliq.errors import RedisUnavailableError
from tests.harness.chaos import vandal
from tests.harness.chaos.arena import Arena, Member
from tests.harness.chaos.grounds import OneServer
from tests.harness.chaos.outages import FAULTS_OF_A_CLUSTER
from tests.harness.chaos.schedule import OF_KEYS, OF_PROCESSES, OF_THE_SERVER, Fault
from tests.harness.chaos.workload import KEYS, LEASE_SECONDS, PER_KEY, QUEUES

#: How often a server that does not answer is told again.
TRIES = 10


def consumer_killed(arena: Arena, fault: Fault) -> None:
    _replace(arena.consumers[fault.victim], signal.SIGKILL)


def consumer_stopped(arena: Arena, fault: Fault) -> None:
    _replace(arena.consumers[fault.victim], signal.SIGTERM)


def producer_killed(arena: Arena, fault: Fault) -> None:
    _replace(arena.producers[fault.victim], signal.SIGKILL)


def consumer_paused(arena: Arena, fault: Fault) -> None:
    member = arena.consumers[fault.victim]
    with member.lock:
        member.send(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_SECONDS)
        member.send(signal.SIGCONT)


def server_paused(arena: Arena, fault: Fault) -> None:
    os.kill(_ground(arena).server.pid, signal.SIGSTOP)
    time.sleep(fault.seconds)
    os.kill(_ground(arena).server.pid, signal.SIGCONT)


def server_killed(arena: Arena, fault: Fault) -> None:
    _ground(arena).server.kill()
    time.sleep(fault.seconds / 3)
    while True:
        try:
            _ground(arena).server.start()
        except RedisUnavailableError:  # it still reads its log, on a machine with much else to do
            _ground(arena).server.kill()
        else:
            return


def server_asleep(arena: Arena, _fault: Fault) -> None:
    _tell(arena, "DEBUG", "SLEEP", "0.7")


def clients_killed(arena: Arena, _fault: Fault) -> None:
    _tell(arena, "CLIENT", "KILL", "TYPE", "normal")


def writes_paused(arena: Arena, _fault: Fault) -> None:
    _tell(arena, "CLIENT", "PAUSE", "800", "WRITE")
    time.sleep(0.8)


def scripts_flushed(arena: Arena, _fault: Fault) -> None:
    _tell(arena, "SCRIPT", "FLUSH")


def memory_full(arena: Arena, _fault: Fault) -> None:
    _tell(arena, "CONFIG", "SET", "maxmemory", "1")
    time.sleep(1)
    _tell(arena, "CONFIG", "SET", "maxmemory", "0")


def replies_lost(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, f"swallow {fault.count} close", fault.seconds)


def replies_silenced(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, f"swallow {fault.count} silent", fault.seconds)


def replies_late(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, f"delay {fault.seconds / 3:.3f}", fault.seconds)


def hostile_messages(arena: Arena, fault: Fault) -> None:
    seed = round(fault.at * 1000)
    ids = _over(arena, lambda client: vandal.write(client, seed, fault.victim)) or []
    time.sleep(fault.seconds)
    if ids:
        _over(arena, lambda client: vandal.take_back(client, fault.victim, ids))


def limits_changed(arena: Arena, fault: Fault) -> None:
    """Have fewer messages run at once for a while, as an operator does."""
    keys = QUEUES["narrow"].keys
    for per_key, concurrency in ((1, 4), (PER_KEY["narrow"], 24)):
        fields = {"per_key": str(per_key), "concurrency": str(concurrency)}
        _call(arena, transitions.limit(keys, fields))
        time.sleep(fault.seconds)


def keys_asleep(arena: Arena, fault: Fault) -> None:
    """Pause some keys, and let them go on: one by its time, one by hand."""
    for name in PER_KEY:
        keys = QUEUES[name].keys
        _call(arena, transitions.sleep(keys, KEYS[0], for_ms=round(1000 * fault.seconds)))
        _call(arena, transitions.sleep(keys, KEYS[1], for_ms=None))
    time.sleep(fault.seconds)
    for name in PER_KEY:
        _call(arena, transitions.sleep(QUEUES[name].keys, KEYS[1], for_ms=0))


FAULTS: dict[str, Callable[[Arena, Fault], None]] = FAULTS_OF_A_CLUSTER | {
    name: globals()[name] for name in (*OF_PROCESSES, *OF_THE_SERVER, *OF_KEYS)
}


def unleash(arena: Arena, faults: list[Fault], start: float) -> list[Future[None]]:
    """Do the faults, each at its time after `start`, in two threads; return what tells their end, and what ended them."""
    tracks = [[fault for fault in faults if (fault.kind in OF_PROCESSES) is each] for each in (True, False)]
    return [_in_background(partial(_track, arena, mine, start)) for mine in tracks]


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Do it in a thread that a run which is interrupted does not wait for."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return future


def _track(arena: Arena, faults: list[Fault], start: float) -> None:
    for fault in faults:
        time.sleep(max(0.0, start + fault.at - time.monotonic()))
        if time.monotonic() > start + fault.length:
            return  # those before took their time
        began = time.monotonic()
        FAULTS[fault.kind](arena, fault)
        arena.journal.write("fault", of=fault.kind, victim=fault.victim, began=began)


def _replace(member: Member, how: signal.Signals) -> None:
    with member.lock:
        member.end(how)
        member.start()


def _call(arena: Arena, call: Call[Any]) -> None:
    _over(arena, lambda client: client.execute_command(*call.command_in_full))


def _tell(arena: Arena, *command: str) -> None:
    """Make the server do something, and see to it that it has heard: what is not healed would spoil the run."""
    _over(arena, lambda client: client.execute_command(*command))


def _over(arena: Arena, ask: Callable[[redis.Redis], Any]) -> Any:
    """Return what `ask` gets over a connection that no proxy disturbs."""
    for _ in range(TRIES):
        with redis.Redis(unix_socket_path=str(_ground(arena).server.socket), socket_timeout=20) as client:
            try:
                return ask(client)
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.2)
    return None


def _ground(arena: Arena) -> OneServer:
    assert isinstance(arena.ground, OneServer)
    return arena.ground


def _misdirect(arena: Arena, order: str, seconds: float) -> None:
    _ground(arena).proxy.order(order)
    time.sleep(seconds)
    _ground(arena).proxy.order("heal")
