"""
Faults and what a person sees of them: the colours of the first screen after 60 s, and the alerts that fire by when.

Each case replays recorded series in promtool. Whatever a case does not list stays green or without colour, and silent.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from panels import BY_TITLE, GRAFANA, TILES, column_field, filled, shown_in

#: There is a sample every 15 s. A fault begins after ten healthy minutes, a moment after a scrape.
STEP, QUIET, LOOK = 15, 600, 60
RED, YELLOW, ORANGE, BLUE, GREEN, GREY = "red", "#EAB839", "orange", "blue", "green", "#666"
READERS, TARGETS = ("w1", "w2", "exporter"), ("w1", "w2", "exporter", "shop")
SERVERS = ("redis-a", "redis-b")
#: Queue -> messages a second. `tenants` has message keys, `mails` a periodic job.
QUEUES = {"orders": 200, "mails": 1, "tenants": 5, "events": 20}

#: A value of a healthy system at a time.
Healthy = Callable[[int], float]
#: A value that many seconds after the fault, by the last healthy value; None when the target reports none.
Change = Callable[[int, float], float | None]


def steady(value: float) -> Healthy:
    return lambda _time: value


def growing(a_second: float) -> Healthy:
    return lambda time: a_second * time


def in_turn(*values: float) -> Healthy:
    return lambda time: values[time // STEP % len(values)]


def becomes(value: float) -> Change:
    return lambda _seconds, _before: value


def grows(a_second: float, after: int = 0) -> Change:
    return lambda seconds, before: before + a_second * max(0, seconds - after)


GONE: Change = lambda _seconds, _before: None  # noqa: E731
STOPS = grows(0)

#: Name, instance, values of other labels, and the series -> its values in a healthy system.
SYSTEM: dict[tuple[str, ...], Healthy] = {}


def reported(instances, name, value, **labels):
    """Add a series for each of these instances."""
    for instance in instances:
        text = ",".join(f'{label}="{of}"' for label, of in labels.items())
        SYSTEM[
            name, instance, *labels.values(), f'{name}{{cluster="test",job="reliq",instance="{instance}",{text}}}'
        ] = value


reported(TARGETS, "up", steady(1))
for server in SERVERS:
    for name, value in {"up": 1, "memory_bytes": 3e8, "memory_limit_bytes": 1e9, "aof_enabled": 1}.items():
        reported(READERS, f"reliq_redis_{name}", steady(value), server=server)
    for name in ("eviction_enabled", "evicted_keys_total"):
        reported(READERS, f"reliq_redis_{name}", steady(0), server=server)
    reported(READERS, "reliq_redis_scrape_seconds", in_turn(0.002, 0.004, 0.003), server=server)
for queue, a_second in QUEUES.items():
    for name in ("queue_unreadable", "paused", "dead_letters", "dead_total", "expired_total", "redriven_total"):
        reported(READERS, f"reliq_{name}", steady(0), queue=queue)
    for name in ("messages_unaccounted", "shard_map_lost", "go_layout"):
        reported(READERS, f"reliq_{name}", steady(0), queue=queue)
    for name, share in {"published": 1, "acked": 0.997, "nacked": 0.003}.items():
        reported(READERS, f"reliq_{name}_total", growing(share * a_second), queue=queue)
    # The producer publishes in bursts.
    reported(READERS, "reliq_backlog", in_turn(0, a_second / 4, 0), queue=queue)
    for state in ("pending", "ready", "retry", *(["waiting"] if queue == "tenants" else [])):
        reported(READERS, "reliq_messages", in_turn(0, a_second / 4, 0), queue=queue, state=state)
        reported(READERS, "reliq_oldest_message_age_seconds", in_turn(0, 0.3, 0.1), queue=queue, state=state)
    for kind, number in {"running": 4, "backoff": 2}.items():
        reported(READERS, "reliq_unack", steady(number), queue=queue, kind=kind)
reported(READERS, "reliq_key_blocked_seconds", in_turn(0, 2), queue="tenants")
reported(
    READERS, "reliq_cron_next_timestamp_seconds", lambda time: 60 * (time // 60 + 1), queue="mails", entry="minutely"
)
WORKERS = ("w1", "w2")
reported(WORKERS, "reliq_workers", steady(2))
reported(WORKERS, "reliq_slots", steady(16))
reported(WORKERS, "reliq_slots_busy", in_turn(16, 5, 12, 3))
reported(WORKERS, "reliq_slots_hung", steady(0))
reported(WORKERS, "reliq_last_claim_timestamp_seconds", lambda time: time - 1)
reported(WORKERS, "reliq_restarts_total", steady(0), reason="killed")
for reason in ("away", "refused"):
    reported(WORKERS, "reliq_redis_errors_total", steady(0), reason=reason)
#: Only some systems have an outbox.
HEALTHY = dict(SYSTEM)
reported(["relay"], "up", steady(1))
reported(["relay"], "reliq_workers", steady(1))
reported(["relay"], "reliq_outbox_oldest_seconds", in_turn(0, 0.5))


@dataclass(frozen=True)
class Fault:
    """
    A fault and its effects.

    Attributes:
        does: a metric and labels of its series, * for all metrics -> their values from the fault on.
        tiles: tiles that are not green 60 s later.
        cells: a queue and a column of `Queues now` -> its colour 60 s later.
        alerts: alert -> by how many minutes after the fault it fires, at most 75 s earlier.
    """

    does: dict[str, Change]
    tiles: dict[str, str] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)
    alerts: dict[str, float] = field(default_factory=dict)
    minutes: int = 20
    series: dict[tuple[str, ...], Healthy] = field(default_factory=lambda: HEALTHY)


def waits(queue, state, a_second):
    """Messages of a queue wait in this state and are not handled."""
    return {
        f"reliq_messages {queue} {state}": grows(a_second),
        f"reliq_backlog {queue}": grows(a_second),
        f"reliq_oldest_message_age_seconds {queue} {state}": grows(1),
    }


def fails(queue, acked, nacked, after=0):
    """A share of the attempts of a queue fails."""
    return {f"reliq_acked_total {queue}": grows(acked, after), f"reliq_nacked_total {queue}": grows(nacked, after)}


UNREADABLE = {"reliq_queue_unreadable events": becomes(1)}
OF_EVENTS = {"* events": GONE, **UNREADABLE}
FAULTS = {
    "healthy": Fault({}),
    "no worker": Fault(
        {
            "* w1": GONE,
            "* w2": GONE,
            "up w1": becomes(0),
            "up w2": becomes(0),
            "reliq_acked_total": STOPS,
            "reliq_nacked_total": STOPS,
            **waits("orders", "ready", 200),
            "reliq_cron_next_timestamp_seconds exporter": becomes(660),
        },
        {"Targets": RED, "Busy 5m": RED, "Oldest": YELLOW},
        {"orders ready": RED, "orders late": YELLOW},
        {
            "ReliqTargetDown": 2.5,
            "ReliqNoWorkers": 2.5,
            "ReliqBacklogGrowing": 3.5,
            "ReliqTickLate": 3.5,
            "ReliqOldestMessageTooOld": 4.5,
        },
    ),
    "no worker for a queue with keys": Fault(
        waits("tenants", "waiting", 5),
        {"Oldest": YELLOW},
        {"tenants late": YELLOW},
        {"ReliqBacklogGrowing": 3.5, "ReliqOldestMessageTooOld": 4.5},
    ),
    "slow handler": Fault(
        {**waits("orders", "ready", 190), **fails("orders", 10, 0.03), "reliq_slots_busy": becomes(16)},
        {"Oldest": YELLOW},
        {"orders ready": RED, "orders late": YELLOW},
        {"ReliqBacklogGrowing": 3.5, "ReliqOldestMessageTooOld": 4.5, "ReliqSlotsFull": 6.5},
    ),
    "20 % fail": Fault(
        {**fails("orders", 160, 40), "reliq_unack orders backoff": becomes(400)},
        {"Failed": YELLOW},
        {"orders failed": YELLOW, "orders backoff": YELLOW},
        {"ReliqFailuresHigh": 12},
    ),
    "poison 3 %": Fault(
        # Poison messages become dead letters when their retries run out.
        {
            **fails("orders", 194, 30),
            "reliq_unack orders backoff": becomes(129),
            "reliq_dead_total orders": grows(6, after=150),
            "reliq_dead_letters orders": grows(6, after=150),
        },
        {"Failed": YELLOW},
        {"orders failed": YELLOW, "orders backoff": YELLOW},
        {"ReliqDeadLettersRising": 3, "ReliqFailuresHigh": 12},
    ),
    "dead letters": Fault(
        {"reliq_dead_total orders": grows(1), "reliq_dead_letters orders": grows(1)},
        {"Died 1h": RED, "Alerts": RED},
        {"orders dead": YELLOW},
        {"ReliqDeadLettersRising": 0.5},
    ),
    "Redis away": Fault(
        {
            **{f"* {name}": GONE for name in (*QUEUES, *SERVERS)},
            "reliq_redis_up": becomes(0),
            "reliq_queue_unreadable": becomes(1),
            "reliq_slots_busy": becomes(0),
            "reliq_last_claim_timestamp_seconds": STOPS,
            "reliq_redis_errors_total away": grows(2),
        },
        dict.fromkeys(("Memory", "Oldest", "Failed", "Died 1h"), GREY) | {"Redis": RED},
        {f"{queue} state": RED for queue in QUEUES},
        {"ReliqRedisDown": 1.5},
    ),
    "Redis at 96 % of maxmemory": Fault(
        {"reliq_redis_memory_bytes redis-a": becomes(9.6e8)}, {"Memory": RED}, {}, {"ReliqRedisMemoryHigh": 5.5}
    ),
    "Redis without maxmemory": Fault({"reliq_redis_memory_limit_bytes": becomes(0)}),
    "Redis full": Fault(
        {
            "reliq_redis_memory_bytes": becomes(1.02e9),
            "reliq_published_total": STOPS,
            "reliq_acked_total": STOPS,
            "reliq_nacked_total": STOPS,
            "reliq_redis_errors_total refused": grows(0.2),
            "reliq_cron_next_timestamp_seconds": becomes(660),
        },
        {"Redis": RED, "Memory": RED, "Alerts": RED},
        {},
        {"ReliqRedisMemoryHigh": 0.5, "ReliqRedisRefuses": 2, "ReliqTickLate": 3.5},
    ),
    "Redis refuses writes: too few replicas": Fault(
        {
            "reliq_published_total": STOPS,
            "reliq_acked_total": STOPS,
            "reliq_nacked_total": STOPS,
            "reliq_redis_errors_total refused": grows(3),
            "reliq_cron_next_timestamp_seconds": becomes(660),
        },
        {"Redis": RED},
        {},
        {"ReliqRedisRefuses": 2, "ReliqTickLate": 3.5},
    ),
    "paused": Fault(
        {**waits("orders", "ready", 200), "reliq_paused orders": becomes(1), **fails("orders", 0, 0)},
        {},
        {"orders ready": RED, "orders late": YELLOW, "orders state": BLUE},
        {"ReliqPausedLong": 61},
        minutes=70,
    ),
    "key held up": Fault(
        {
            "reliq_messages tenants waiting": grows(0.1),
            "reliq_backlog tenants": grows(0.1),
            "reliq_oldest_message_age_seconds tenants waiting": GONE,  # no key is in turn
            "reliq_key_blocked_seconds": grows(1),
        },
        {},
        {"tenants key blocked": YELLOW},
        {"ReliqKeyHeldUp": 61},
        minutes=70,
    ),
    "one of two shards slow": Fault(
        {**OF_EVENTS, "reliq_redis_scrape_seconds redis-b": becomes(0.6)},
        {"Redis": YELLOW},
        {"events state": RED},
        {"ReliqQueueUnreadable": 1.5, "ReliqRedisSlow": 2.5},
    ),
    "one of two shards dead": Fault(
        {**OF_EVENTS, "* redis-b": GONE, "reliq_redis_up redis-b": becomes(0)},
        {"Redis": ORANGE},
        {"events state": RED},
        {"ReliqRedisDown": 1.5},
    ),
    "a queue's key is spoilt": Fault(OF_EVENTS, {}, {"events state": RED}, {"ReliqQueueUnreadable": 1.5}),
    "the body of a periodic job raises": Fault(
        {"reliq_cron_next_timestamp_seconds": becomes(QUIET)},
        {"Oldest": YELLOW},
        {"mails late": YELLOW},
        {"ReliqTickLate": 2.5},
    ),
    "Redis refuses the messages of the outbox": Fault(
        {"reliq_outbox_oldest_seconds": grows(1)},
        {"Oldest": YELLOW},
        {},
        {"ReliqOutboxLate": 3.5},
        series=SYSTEM,
    ),
    "the worker with the relay is dead": Fault(
        {"* relay": GONE, "up relay": becomes(0)},
        {"Targets": RED},
        {},
        {"ReliqTargetDown": 2.5, "ReliqOutboxLate": 2.5},
        series=SYSTEM,
    ),
    "exporter dead": Fault(
        {"* exporter": GONE, "up exporter": becomes(0)}, {"Targets": RED}, {}, {"ReliqTargetDown": 2.5}
    ),
    "one of two workers gone from discovery": Fault(
        {"* w2": GONE}, {"Targets": YELLOW}, {}, {"ReliqWorkersLost": 10.5}
    ),
}


def recorded(fault):
    """Return the series of a fault for promtool. A series that ends is marked as stale, as a scrape does it."""
    shown = []
    for (name, *values, series), healthy in fault.series.items():
        change = None
        for words, one in fault.does.items():
            metric, *labels = words.split()
            if metric in {name, "*"} and set(labels) <= set(values):
                change = one
        samples = [healthy(time) for time in range(0, QUIET + 1, STEP)]
        for seconds in range(STEP, 60 * fault.minutes + 1, STEP):
            samples.append(change(seconds, samples[QUIET // STEP]) if change else healthy(QUIET + seconds))
        text = ["stale" if one is None else f"{one:g}" for one in samples]
        shown.append({"series": series, "values": " ".join(text)})
    return shown


def asked(query, seconds, found=()):
    """Return a query for promtool that returns 1 for each of these labels."""
    samples = [{"labels": labels, "value": 1} for labels in found]
    return {"expr": query, "eval_time": f"{seconds}s", "exp_samples": samples}


def colours_of_tiles(tiles, seconds):
    for tile in TILES:
        query, field = filled(tile["targets"][0]["expr"]), tile["fieldConfig"]["defaults"]
        colour = tiles.get(tile["title"], GREEN)
        yield asked(
            f"absent({query})" if colour == GREY else f"group({shown_in(field, query, colour)})", seconds, ["{}"]
        )


def colours_of_cells(cells, seconds):
    title = "Queues now"
    columns = {target["legendFormat"] for target in BY_TITLE[title]["targets"]}
    assert set(cells) <= {f"{queue} {column}" for queue in QUEUES for column in columns}
    for target in BY_TITLE[title]["targets"]:
        column = target["legendFormat"]
        for colour in {RED, YELLOW, BLUE}:
            queues = [queue for queue in QUEUES if cells.get(f"{queue} {column}") == colour]
            query = shown_in(column_field(title, column), filled(target["expr"]), colour)
            assert query or not queues, (column, colour)
            if query:
                yield asked(f"group by (queue) ({query})", seconds, [f'{{queue="{queue}"}}' for queue in queues])


def alerts_of(alerts, minutes):
    yield asked("ALERTS", QUIET)
    fired = 'group by (alertname) (max_over_time(ALERTS{alertstate="firing"%s}[2h]))'
    for alert, by in alerts.items():
        due = QUIET + round(60 * by)
        yield asked(fired % f',alertname="{alert}"', due - 75, [])
        yield asked(fired % f',alertname="{alert}"', due, [f'{{alertname="{alert}"}}'])
    yield asked(fired % "", QUIET + 60 * minutes, [f'{{alertname="{alert}"}}' for alert in alerts])
    if not alerts:
        yield asked("group by (alertname) (max_over_time(ALERTS[2h]))", QUIET + 60 * minutes)


def run(promtool, tmp_path, series, questions, rules=(str(GRAFANA / "rules.yml"),)):
    test = {"interval": f"{STEP}s", "input_series": series, "promql_expr_test": [*questions]}
    wanted = {"rule_files": [*rules], "evaluation_interval": f"{STEP}s", "tests": [test]}
    (tmp_path / "tests.yml").write_text(json.dumps(wanted))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_colours_the_first_screen_within_a_minute_and_fires_only_its_alerts(promtool, tmp_path, name):
    fault = FAULTS[name]
    assert set(fault.tiles) <= {tile["title"] for tile in TILES}
    questions = [
        *colours_of_tiles(fault.tiles, QUIET + LOOK),
        *colours_of_cells(fault.cells, QUIET + LOOK),
        *alerts_of(fault.alerts, fault.minutes),
    ]

    run(promtool, tmp_path, recorded(fault), questions)


def test_every_tile_is_grey_while_prometheus_has_no_data(promtool, tmp_path):
    series = [{"series": "unrelated", "values": "1x9"}]
    run(promtool, tmp_path, series, colours_of_tiles({tile["title"]: GREY for tile in TILES}, LOOK), rules=())
