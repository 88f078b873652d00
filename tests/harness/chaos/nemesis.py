"""The faults: one function for each kind, which injects the fault, waits, and ends it."""

import os
import signal
import threading
import time
from concurrent.futures import Future

from reliq.errors import RedisUnavailableError
from reliq.lua import transitions
from tests.harness.chaos import outages, vandal
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.schedule import OF_PROCESSES, Fault
from tests.harness.chaos.workload import KEYS, LEASE_SECONDS, PER_KEY, QUEUES


def consumer_killed(arena: Arena, fault: Fault) -> None:
    arena.consumers[fault.victim].replace(signal.SIGKILL)


def consumer_stopped(arena: Arena, fault: Fault) -> None:
    arena.consumers[fault.victim].replace(signal.SIGTERM)


def producer_killed(arena: Arena, fault: Fault) -> None:
    arena.producers[fault.victim].replace(signal.SIGKILL)


def consumer_paused(arena: Arena, fault: Fault) -> None:
    with arena.consumers[fault.victim].paused():
        time.sleep(1.5 * LEASE_SECONDS)


def server_paused(arena: Arena, fault: Fault) -> None:
    os.kill(arena.ground.server.pid, signal.SIGSTOP)
    time.sleep(fault.seconds)
    os.kill(arena.ground.server.pid, signal.SIGCONT)


def server_killed(arena: Arena, fault: Fault) -> None:
    server = arena.ground.server
    server.kill()
    time.sleep(fault.seconds / 3)
    while not server.is_running:
        try:
            server.start()
        except RedisUnavailableError:  # on a busy machine it may still be reading its log
            server.kill()


def server_asleep(arena: Arena, _fault: Fault) -> None:
    _ask(arena, "DEBUG", "SLEEP", "0.7")


def clients_killed(arena: Arena, _fault: Fault) -> None:
    _ask(arena, "CLIENT", "KILL", "TYPE", "normal")


def writes_paused(arena: Arena, _fault: Fault) -> None:
    _ask(arena, "CLIENT", "PAUSE", "800", "WRITE")
    time.sleep(0.8)


def scripts_flushed(arena: Arena, _fault: Fault) -> None:
    _ask(arena, "SCRIPT", "FLUSH")


def memory_full(arena: Arena, _fault: Fault) -> None:
    _ask(arena, "CONFIG", "SET", "maxmemory", "1")
    time.sleep(1)
    _ask(arena, "CONFIG", "SET", "maxmemory", "0")


def replies_lost(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, fault, swallow=fault.count)


def replies_silenced(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, fault, swallow=fault.count, silent=True)


def replies_late(arena: Arena, fault: Fault) -> None:
    _misdirect(arena, fault, delay=fault.seconds / 3)


def hostile_messages(arena: Arena, fault: Fault) -> None:
    client = arena.ground.client()
    ids = vandal.write(client, round(fault.at * 1000), fault.victim)
    time.sleep(fault.seconds)
    vandal.take_back(client, fault.victim, ids)


def limits_changed(arena: Arena, fault: Fault) -> None:
    """Lower the concurrency limits for a while, as an operator does."""
    for per_key, concurrency in ((1, 4), (PER_KEY["narrow"], 24)):
        fields = {"per_key": str(per_key), "concurrency": str(concurrency)}
        _ask(arena, *transitions.limit(QUEUES["narrow"].keys, fields).command_in_full)
        time.sleep(fault.seconds)


def keys_asleep(arena: Arena, fault: Fault) -> None:
    """Pause some keys and resume them: some by a time limit, some by a call."""
    for name in PER_KEY:
        _sleep(arena, name, KEYS[0], round(1000 * fault.seconds))
        _sleep(arena, name, KEYS[1], None)
    time.sleep(fault.seconds)
    for name in PER_KEY:
        _sleep(arena, name, KEYS[1], 0)


def unleash(arena: Arena, faults: list[Fault], start: float) -> list[Future[None]]:
    """Run the faults at their times after `start`, in two threads; return futures that end with them, or fail."""
    tracks = [[fault for fault in faults if (fault.kind in OF_PROCESSES) is each] for each in (True, False)]
    futures: list[Future[None]] = [Future() for _ in tracks]
    for track, future in zip(tracks, futures, strict=True):
        threading.Thread(target=_run, args=(future, arena, track, start), daemon=True).start()
    return futures


def _run(future: Future[None], arena: Arena, faults: list[Fault], start: float) -> None:
    """Run faults one after another in a daemon thread, so that an interrupted run can end."""
    try:
        future.set_result(_track(arena, faults, start))
    except BaseException as failure:
        future.set_exception(failure)


def _track(arena: Arena, faults: list[Fault], start: float) -> None:
    for fault in faults:
        time.sleep(max(0.0, start + fault.at - time.monotonic()))
        if time.monotonic() > start + fault.length:
            return  # earlier faults took longer
        began = time.monotonic()
        function = globals().get(fault.kind) or getattr(outages, fault.kind)
        function(arena, fault)
        arena.journal.write("fault", of=fault.kind, began=began)


def _ask(arena: Arena, *command: object) -> None:
    """Send a command to the server without a proxy."""
    arena.ground.client().execute_command(*command)


def _sleep(arena: Arena, queue: str, key: str, for_ms: int | None) -> None:
    _ask(arena, *transitions.sleep(QUEUES[queue].keys, key, for_ms=for_ms).command_in_full)


def _misdirect(arena: Arena, fault: Fault, **order: object) -> None:
    arena.ground.proxy.order(**order)
    time.sleep(fault.seconds)
    arena.ground.proxy.order()
