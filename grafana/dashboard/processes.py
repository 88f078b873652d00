"""The rows of processes: how long handlers take, what workers do, how Redis is."""

from parts import ACKED, QUEUE, RED, SLOW, SOURCE, UP, WINDOW, YELLOW, Column, Panel, grown, of, of_queues, quantile

#: The colour of a kind, the same in every panel; red is for what is wrong.
OUTCOMES = {
    "ack": "green",
    "nack": "orange",
    "reject": "red",
    "snooze": "blue",
    "rate_limited": "light-blue",
    "timeout": "purple",
}


def handler(share: int) -> Panel:
    """Return the panel of one quantile of the handlers' time."""
    return Panel(
        f"Handler time p{share}",
        f"Of the calls that ended well, {share} % were faster. When it rises, what the handler calls has become slow; "
        "failed calls are left out, so that quick failures hide nothing.",
        of_queues(quantile(share / 100, "reliq_handler_seconds", ACKED), "NaN"),
        unit="s",
        limits=SLOW,
    )


def longest(title: str, description: str, name: str, limits: dict[float, str]) -> Panel:
    """Return the panel of a time in seconds, of each process the longest."""
    return Panel(title, description, {"{{instance}}": of(name, how="max")}, unit="s", limits=limits)


LATENCY = [
    Panel(
        "Lag p50",
        "From a message's due time to the start of its handler: half of what started lately waited less. High: too few slots.",
        of_queues(quantile(0.5, "reliq_lag_seconds"), "NaN"),
        unit="s",
        limits={10: YELLOW, 60: RED},
    ),
    longest(
        "Longest running handler",
        "For how long the oldest running handler has run. When it grows without end, a handler hangs: `reliq running` "
        "names the message, SIGUSR1 writes the stacks to the worker's log.",
        "reliq_longest_running_seconds",
        {300: YELLOW, 600: RED},
    ),
    Panel(
        "Handlers by outcome",
        "Calls per second by how they ended, of the chosen queues. A timeout is a handler that overran its time: its "
        "slot is lost until the process is replaced.",
        {"{{outcome}}": f"sum by (outcome) (rate(reliq_handler_seconds_count{{{QUEUE}}}{WINDOW}))"},
        unit="mps",
        colours=OUTCOMES,
    ),
    handler(50),
    handler(95),
    handler(99),
    Panel(
        "Publish time p99",
        "How long a call of publish took, from applications that expose reliq's metrics of producers. When it rises, "
        "Redis or the network is slow. No value: no application exposes them.",
        of_queues(
            "histogram_quantile(0.99, sum by (le, queue) "
            f'(rate(reliq_publish_seconds_bucket{{queue=~"$queue",cluster="$cluster"}}{WINDOW})))',
            "NaN",
        ),
        unit="s",
        limits={0.5: YELLOW, 2: RED},
    ),
    Panel(
        "Publishes by outcome",
        "Messages per second by what publish answered. Refused: Redis is out of memory or the backlog is limited; "
        "unknown: the reply was lost, publish again with the same id.",
        {
            "{{outcome}}": "sum by (outcome) (rate(reliq_publish_messages_total"
            f'{{queue=~"$queue",cluster="$cluster"}}{WINDOW})) or label_replace(vector(0), "outcome", "published", "", "")'
        },
        unit="mps",
        colours={
            "published": "green",
            "duplicate": "blue",
            "tombstoned": "yellow",
            "refused": "red",
            "unknown": "orange",
        },
    ),
    Panel(
        "In flight",
        "Messages in worker processes: running, or held for a slot that is about to be free. Held stays small by "
        "design; when it does not go down, handlers have become slower within the last moment.",
        {"{{phase}}": of("reliq_inflight", "phase")},
        colours={"running": "green", "held": "yellow"},
    ),
]
WORKERS = [
    Panel(
        "Worker processes",
        "Processes that run handlers, 0 for a target that does not answer. Fewer than --processes: they cannot start, "
        "read the worker's log.",
        {"{{instance}}": f"{of('reliq_workers')} or 0 * max by (instance) ({UP} == 0)"},
        limits={},
    ),
    Panel(
        "Restarts",
        "Processes that ended and were replaced. killed: by a signal, such as the kernel when memory is short; crashed: "
        "by an exit; hung, overran: handlers past their timeout; memory, jobs: by the limits that you set.",
        {"{{reason}}": grown("reliq_restarts_total", "reason")},
        bars=True,
        colours={"killed": "red", "crashed": "orange", "hung": "purple", "overran": "yellow", "jobs": "green"},
    ),
    Panel(
        "Last claim age",
        "Since the slowest process of each worker completed a claim round. An idle process makes one every second; "
        "above 30 s /live fails.",
        {
            "{{instance}}": f"max by (instance) (timestamp(reliq_last_claim_timestamp_seconds{{{SOURCE}}}) "
            f"- reliq_last_claim_timestamp_seconds{{{SOURCE}}})"
        },
        unit="s",
        limits={10: YELLOW, 30: RED},
    ),
    Panel(
        "Leases lost",
        "Answers that came after their lease had run out: the message ran twice. Above 0: paused processes, starved "
        "CPU, handlers that hold the interpreter, or a lease that is too short.",
        of_queues(grown("reliq_leases_lost_total", "queue", QUEUE)),
        bars=True,
        limits={1: RED},
    ),
    Panel(
        "Late renewals",
        "Renewals of leases that came late: a process was held up by starved CPU, a stopped machine, or a handler that "
        "holds the interpreter. Give it more CPU, or move such work to --concurrency 1.",
        {"{{instance}}": grown("reliq_renewals_late_total")},
        bars=True,
        limits={1: YELLOW},
    ),
    Panel(
        "Hung slots",
        "Slots lost to handlers that overran their time and cannot be ended. Above 0: give what the handler calls a "
        "time-out of its own.",
        {"{{instance}}": of("reliq_slots_hung")},
        limits={1: RED},
    ),
    Panel(
        "CPU",
        "Processor time per second of each worker, its supervisor included: 100 % is one core. A process at 100 % runs "
        "no more handlers at once, whatever its slots: add processes.",
        {"{{instance}}": f'sum by (instance) (rate(process_cpu_seconds_total{{process!="",{SOURCE}}}{WINDOW}))'},
        unit="percentunit",
    ),
    Panel(
        "Memory",
        "Resident memory of each worker's processes together. When it only grows, a handler leaks: --max-memory "
        "replaces a process in time.",
        {"{{instance}}": of("process_resident_memory_bytes", more='process!="",')},
        unit="bytes",
    ),
    Panel(
        "Outbox",
        "Rows of the outbox that wait for a relay, the age of the oldest in seconds, and rounds in which the database was "
        "away. It grows: no relay runs, or Redis refuses a queue, which the relay's log names.",
        {
            "rows": f"max(reliq_outbox_rows{{{SOURCE}}})",
            "oldest, s": f"max(reliq_outbox_oldest_seconds{{{SOURCE}}})",
            "database away": f"round(sum(increase(reliq_outbox_database_errors_total{{{SOURCE}}}{WINDOW})))",
        },
        limits={1000: YELLOW},
    ),
    Panel(
        "Redis errors",
        "Tries of workers that failed, and times that Redis was away for a process and answered again. away: network or "
        "server; refused: Redis is out of memory, read-only, or denies a command.",
        {
            "{{reason}}": grown("reliq_redis_errors_total", "reason"),
            "reconnects": f"round(sum(increase(reliq_redis_reconnects_total{{{SOURCE}}}{WINDOW})))",
        },
        bars=True,
        colours={"away": "orange", "refused": "red", "reconnects": "green"},
    ),
    Panel(
        "Instances",
        "What runs where. Two versions are normal during a rolling deploy; for longer: a deploy stopped half way.",
        {
            "processes": f"max by (instance, version, python, redis_py) (reliq_build_info{{{SOURCE}}}) "
            f"* on (instance) group_left () {of('reliq_workers')} "
            f"or 0 * max by (instance, version, python, redis_py) (reliq_build_info{{{SOURCE}}})",
            "up for": f'time() - max by (instance) (process_start_time_seconds{{process="supervisor",{SOURCE}}})',
            "open files": of("process_open_fds", how="max", more='process!="",'),
        },
        "table",
        24,
        7,
        columns=(
            Column("instance", label=True),
            Column("version", 140, label=True),
            Column("python", 140, label=True),
            Column("redis_py", 140, label=True),
            Column("processes", 120),
            Column("up for", 140, unit="s"),
            Column("open files", 140, limits={800: YELLOW}),
        ),
    ),
]
REDIS = [
    Panel(
        "Redis memory",
        "Memory used, and the limit; no limit is 0. At the limit publishes are refused while workers go on draining: "
        "free memory or raise maxmemory.",
        {
            "used": f"max(reliq_redis_memory_bytes{{{SOURCE}}})",
            "maxmemory": f"max(reliq_redis_memory_limit_bytes{{{SOURCE}}})",
        },
        unit="bytes",
        colours={"used": "blue", "maxmemory": "red"},
    ),
    Panel(
        "Redis clients",
        "Connections to Redis. A worker process keeps a handful; steady growth: some program leaks them.",
        {"clients": f"max(reliq_redis_clients{{{SOURCE}}})"},
        limits={1000: YELLOW, 9000: RED},
    ),
    longest(
        "Time to ask Redis",
        "How long the round trips of a scrape took. It does not grow with the number of messages; when it rises, Redis "
        "is busy: look at its slow log.",
        "reliq_redis_scrape_seconds",
        {0.1: YELLOW, 0.5: RED},
    ),
    Panel(
        "Evicted keys",
        "Keys that Redis deleted because memory was short. Above 0: messages may be lost, set maxmemory-policy noeviction.",
        {"evicted": f"max(round(increase(reliq_redis_evicted_keys_total{{{SOURCE}}}{WINDOW})))"},
        bars=True,
        limits={1: RED},
    ),
    Panel(
        "Eviction",
        "May Redis delete messages when memory is short? It must not: set maxmemory-policy noeviction.",
        {"__auto": f"max(reliq_redis_eviction_enabled{{{SOURCE}}}) or vector(-1)"},
        "stat",
        4,
        unit="none",
        limits={0: "green", 1: RED},
        mappings={"0": ("off", "green"), "1": ("ON", "red"), "-1": ("unknown", "grey")},
    ),
    Panel(
        "Append-only file",
        "Does Redis write each change to disk? Without it a restart loses what came after the last snapshot.",
        {"__auto": f"min(reliq_redis_aof_enabled{{{SOURCE}}}) or vector(-1)"},
        "stat",
        4,
        unit="none",
        limits={0: YELLOW, 1: "green"},
        mappings={"0": ("off", "yellow"), "1": ("on", "green"), "-1": ("unknown", "grey")},
    ),
    Panel(
        "Queues not shown",
        "unreadable: a key is spoilt, `reliq queues` says which. many: more queues than a scrape looks at; name them to "
        "the exporter with --queue, and remove what is no more with `reliq forget`.",
        {"{{reason}}": f"max by (reason) (reliq_queues_left_out{{{SOURCE}}})"},
        "stat",
        4,
        unit="none",
        text="value_and_name",
        limits={0: "green", 1: YELLOW},
    ),
    Panel(
        "Redis version",
        "What answers. Two versions: workers of one job talk to two servers, or a failover is under way.",
        {"{{version}}": f"max by (version) (reliq_redis_info{{{SOURCE}}})"},
        "stat",
        4,
        unit="none",
        text="name",
    ),
]
