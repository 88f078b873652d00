"""The metrics port: its address, the replies of its probes in trouble, and the commands around it."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from patience import figures, get, only, scrape, value
from ports import free_port
from prometheus_client import CollectorRegistry, Counter, generate_latest
from tenacity import wait_fixed
from waiting import eventually

from reliq import Consumer, Queue, Tasks, WorkerSettings
from reliq.errors import ConfigurationError
from reliq.events import RedisUnavailable
from reliq.metrics.exposition import Page
from reliq.metrics.serving import Endpoint, of_one_process
from reliq.testing.server import EmbeddedRedis
from reliq.worker.health import CLAIM_SECONDS, PATIENT_SECONDS, EngineStats, Pulse


@pytest.fixture
def reliq(command):
    """Run a `reliq` command to its end; return its exit code and output."""

    def run(*arguments):
        done = command(*map(str, arguments))
        return done.wait(), "".join(done.lines)

    return run


def listeners(pid):
    return {place.laddr.ip for place in psutil.Process(pid).net_connections("tcp") if place.status == "LISTEN"}


@pytest.mark.parametrize(
    "arguments",
    [("worker", "monitored:consumer", "--metrics-port"), ("exporter", "--port")],
    ids=["worker", "exporter"],
)
def test_port_in_use_is_reported_in_one_line(reliq, arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = reliq(*arguments, port)

    assert code == 2
    assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in output
    assert "Traceback" not in output


def test_impossible_port_or_host_is_refused():
    with pytest.raises(ConfigurationError, match="metrics port must be 0 to 65535, not 70000"):
        Endpoint(70000, None, page=Page(), live=str, ready=str)
    with pytest.raises(ConfigurationError, match="Cannot assign requested address"):
        Endpoint(0, "192.0.2.1", page=Page(), live=str, ready=str)


def test_endpoint_serves_probes_and_no_other_page():
    with Endpoint(0, None, page=Page(), live=str, ready=lambda: "starting") as endpoint:
        assert get(endpoint.port, "/")[0] == 404
        assert get(endpoint.port, "/live") == (200, "ok\n")
        assert get(endpoint.port, "/ready?x=1") == (503, "starting\n")


@pytest.mark.slow
def test_worker_during_an_outage_serves_its_counters_and_stays_alive(worker, jobs, redis_server, reliq):
    running, port = worker()
    jobs.SHOP.publish("good")
    eventually(lambda: value(scrape(port), "reliq_acked_total", queue="shop"), "the message is handled")
    eventually(lambda: value(scrape(port), "reliq_lag_seconds_count", queue="shop"), "and counted")

    os.kill(redis_server.pid, signal.SIGSTOP)  # worse than a closed port: no reply
    try:
        found = scrape(port)
        assert only(found, "reliq_redis_up") == 0
        assert value(found, "reliq_lag_seconds_count", queue="shop") == 1
        assert value(found, "reliq_messages", queue="shop", state="ready") is None
        assert get(port, "/live")[0] == 200
        assert get(port, "/ready") == (503, "Redis does not answer\n")
        assert reliq("health", "ready", "--port", port)[0] == 1
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)

    eventually(lambda: only(scrape(port), "reliq_redis_up") == 1, "it sees Redis again")
    eventually(lambda: get(port, "/ready")[0] == 200, "and is ready")
    assert reliq("health", "live", "--port", port) == (0, "ok\n")
    assert reliq("health", "ready", "--port", port) == (0, "ok\n")
    assert len(running.children()) == 2


def test_health_command_without_a_worker_fails_with_the_reason(reliq):
    port = free_port()

    code, output = reliq("health", "live", "--port", port)

    assert code == 1
    assert f"no answer from 127.0.0.1:{port}" in output


@pytest.mark.slow
def test_exporter_serves_queues_without_workers_and_waits_for_redis(command, server_path, environment):
    with EmbeddedRedis(server=server_path, port=free_port()) as server:
        Queue("lonely", int, url=server.url).publish(1)
        server.kill()
        port = free_port()
        options = ("--queue", "lonely", "--port", str(port), "--host", "0.0.0.0")
        running = command("exporter", "--url", server.url, *options)
        eventually(lambda: get(port, "/live")[0] == 200, "it serves although Redis is away")
        assert listeners(running.process.pid) == {"0.0.0.0"}
        assert only(scrape(port), "reliq_redis_up") == 0
        assert get(port, "/ready")[0] == 503

        server.start()
        Queue("lonely", int, url=server.url).publish(1)

        eventually(lambda: value(scrape(port), "reliq_messages", queue="lonely", state="ready") == 1, "it sees Redis")
        eventually(lambda: get(port, "/ready")[0] == 200, "and is ready")


@pytest.mark.slow
def test_worker_without_queue_metrics_serves_those_of_processes_and_redis(worker, jobs, client):
    jobs.SHOP.publish("good")
    running, port = worker("--no-queue-metrics", processes=1)

    def whole_page():
        page = scrape(port)
        handled = value(page, "reliq_lag_seconds_count", queue="shop")
        return page if handled == only(page, "reliq_redis_up") == 1 else None

    found = eventually(whole_page, "the message is handled, and Redis has answered in time")

    assert listeners(running.process.pid) == {"127.0.0.1"}
    assert only(found, "reliq_redis_memory_bytes") > 0
    assert {name for name, _ in found} & {"reliq_messages", "reliq_acked_total", "reliq_queues_skipped"} == set()


def served(consumer, **options):
    """The metrics of a consumer in this process, as `Consumer.run(metrics_port=...)` serves them."""
    handlers = consumer.handlers
    return of_one_process(consumer.observers, consumer.stats, consumer.connection(handlers), handlers, **options)


@pytest.fixture
def consumer(url, patient_looks):
    queue, handled = Queue("single", int, url=url), threading.Event()
    consumer = Consumer()

    @consumer.handler(queue)
    def handle(number: int) -> None:
        handled.set()

    consumer.handled, consumer.queue = handled, queue
    yield consumer
    consumer.stop()
    queue.close()


@pytest.mark.usefixtures("patient_looks")
def test_handler_metrics_have_the_tasks_of_the_process_and_no_other(url, monkeypatch):
    """Messages cannot add series: an unknown task counts as `unknown`."""
    monkeypatch.setattr("reliq.tasks.UNKNOWN_WAITS", (600.0, 600.0))  # each message is counted once
    app, later, ended = Tasks("single", url=url), Tasks("single", url=url), threading.Event()
    app.task(name="send", aliases=("mail",))(lambda: None)
    app.task(name="fails", retries=0)(lambda: {}["no"])
    app.task(name="hangs", timeout=0.05, backoff=wait_fixed(600))(lambda: ended.wait(30) and None)
    for name in ("send", "mail", "fails", "hangs", "new", "newer"):
        later.task(name=name)(lambda: None).publish()

    def counts(name="reliq_handler_seconds_count", label="outcome"):
        return {
            (labels["task"], labels[label]): figure
            for (found, pairs), figure in scrape(endpoint.port).items()
            if found == name and (labels := dict(pairs))["queue"] == "single"
        }

    with served(app, port=0) as endpoint:
        begun = dict.fromkeys([("send", "ack"), ("fails", "ack"), ("hangs", "ack")], 0)
        assert counts() == begun
        app.start(WorkerSettings(concurrency=4))
        ends = {("send", "ack"): 2, ("fails", "nack"): 1, ("hangs", "timeout"): 1, ("unknown", "snooze"): 2}
        eventually(lambda: begun | counts() | ends == counts(), "all are counted")
        failures = counts("reliq_handler_failures_total", "exception")
        assert failures == {("fails", "KeyError"): 1, ("hangs", "TimeoutError"): 1}
        ended.set()
        app.stop()


def test_endpoint_serves_the_figures_of_a_running_consumer(consumer):
    with served(consumer, port=0) as endpoint:
        assert get(endpoint.port, "/ready") == (503, "starting: process 0\n")
        consumer.start(WorkerSettings(concurrency=3))
        consumer.queue.publish(1)
        assert consumer.handled.wait(30)
        eventually(lambda: get(endpoint.port, "/ready")[0] == 200, "it is ready")
        now = lambda name, **labels: value(scrape(endpoint.port), name, **labels)  # noqa: E731  used often
        counted = {"queue": "single", "task": "", "outcome": "ack"}
        eventually(lambda: now("reliq_handler_seconds_count", **counted) == 1, "the handler was counted")
        eventually(lambda: now("reliq_slots_busy") == 0, "its slot is free")
        found = scrape(endpoint.port)
        consumer.queue.pause()
        claimed = now("reliq_last_claim_timestamp_seconds")
        eventually(lambda: now("reliq_last_claim_timestamp_seconds") > claimed + 1, "it claims though paused")

    assert value(found, "reliq_slots") == 3
    assert value(found, "reliq_workers") == 1
    assert value(found, "reliq_messages", queue="single", state="ready") == 0
    assert consumer.observers == []


def test_registry_of_the_application_has_the_figures_while_the_consumer_runs(consumer):
    registry = CollectorRegistry(auto_describe=True)
    Counter("mine", "of the user", registry=registry).inc()

    with served(consumer, port=None, registry=registry):
        found = figures(generate_latest(registry).decode())
    after = figures(generate_latest(registry).decode())

    assert value(found, "mine_total") == 1
    assert only(found, "reliq_redis_up") == 1
    assert set(after) == {("mine_total", ())}


@pytest.mark.slow
def test_run_serves_until_it_ends(environment, jobs):
    port = free_port()
    text = f"import monitored; raise SystemExit(monitored.consumer.run(metrics_port={port}))"
    with subprocess.Popen([sys.executable, "-c", text], env=environment) as process:
        eventually(lambda: get(port, "/ready")[0] == 200, "it is ready")
        found = scrape(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    assert value(found, "reliq_slots") == 16
    assert get(port, "/live")[0] == 0


def test_process_without_claim_rounds_is_not_alive():
    memory = mmap.mmap(-1, 1000)
    pulse = Pulse(memory, 100)
    start = pulse._read()[0]
    pulse(RedisUnavailable("", "fetcher", "gone"))
    pulse.note(EngineStats(start + 100, False, 0, 0, 0.0, slots=1, busy_slots=0, hung_slots=0))
    pulse(RedisUnavailable("", "scheduler", "gone"))  # retries of the scheduler are no sign of a claim

    assert pulse.complaint(start + 99 + CLAIM_SECONDS) == ""
    assert pulse.complaint(start + 101 + CLAIM_SECONDS) == "no claim round for 31 s"
    assert Pulse(memory, 100).complaint(start + 101 + CLAIM_SECONDS) == "no claim round for 31 s"


def test_process_without_redis_is_alive_while_it_tries():
    pulse = Pulse()
    facts = pulse._read()  # its last claim was long ago
    pulse._write(facts._replace(claimed_at=facts.claimed_at - 10 * PATIENT_SECONDS, ready=True))
    for part in ("fetcher", "start"):
        pulse(RedisUnavailable("", part, "gone"))
        tried = pulse._read()[1]

        assert pulse.complaint(tried + PATIENT_SECONDS - 1) == ""
        assert "no try to reach Redis" in pulse.complaint(tried + PATIENT_SECONDS + 1)


def test_process_that_starts_repeatedly_has_the_time_of_one_start():
    first = Pulse()
    first.note(None)
    again = Pulse()
    again.note(EngineStats(time.monotonic(), False, 0, 0, 0.0, slots=1, busy_slots=0, hung_slots=0))
    again.follow(first)

    assert again.complaint(first._read()[0] + PATIENT_SECONDS - 1) == ""
    assert again.complaint(first._read()[0] + PATIENT_SECONDS + 1) != ""
    assert not again.is_ready
