"""The rows of queues: how they do, what flows, where their messages are."""

from typing import Any

from parts import (
    BUSY,
    FAILED,
    OLDEST,
    QUEUE,
    RED,
    SLOW,
    WINDOW,
    YELLOW,
    Column,
    Panel,
    gauge,
    of_queues,
    quantile,
    rate,
)

ENDS = ("dead", "expired", "cancelled", "purged", "snoozed", "released", "promoted", "redriven", "letters_dropped")
ACCOUNT = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
#: The colour of a kind, the same in every panel; red is for what is wrong.
KINDS = {"dead": "red", "expired": "dark-red", "cancelled": "yellow", "purged": "orange", "redriven": "blue"}
STATES = {"pending": "blue", "ready": "green", "unack": "yellow", "retry": "orange"}


def account(name: str) -> str:
    """Return what Redis counted of one kind since the queue began."""
    return gauge(f"reliq_{name}_total")


def state(name: str, description: str, query: str = "", **options: Any) -> Panel:
    """Return the panel of one state of a queue's messages."""
    return Panel(name, description, of_queues(query or gauge("reliq_messages", f'state="{name}",')), **options)


def flow(title: str, name: str, description: str) -> Panel:
    """Return the panel of one rate."""
    return Panel(title, description, of_queues(rate(name)), width=6, unit="mps")


HEALTH = [
    Panel(
        "Backlog",
        "Messages that are due and wait for a worker, overdue ones that nobody promotes among them. Short peaks are "
        "normal. When it keeps growing, more is published than handled: see Slots used and Handler time.",
        of_queues(gauge("reliq_backlog")),
        limits={1000: YELLOW, 10000: RED},
    ),
    Panel(
        "Oldest message",
        "For how long the oldest message that is due has waited: this is what users wait. When it grows while workers "
        "run, they are too slow or too few; otherwise no worker serves this queue.",
        of_queues(OLDEST),
        unit="s",
        limits=SLOW,
    ),
    Panel(
        "Lag p99",
        "From a message's due time to the start of its handler: 99 % of what started lately waited less. High while "
        "Lag p50 is low: bursts, or a slow handler that blocks slots.",
        of_queues(quantile(0.99, "reliq_lag_seconds"), "NaN"),
        unit="s",
        limits={10: YELLOW, 60: RED},
    ),
    Panel(
        "Failed",
        "Share of deliveries that failed or were rejected. Above a few percent: look at Failures by exception, and at "
        "what the handler depends on. Failures are retried with backoff, then kept as dead letters.",
        of_queues(FAILED),
        unit="percentunit",
        limits={0.05: YELLOW, 0.5: RED},
    ),
    Panel(
        "Failures by exception",
        "Failed calls per second by the class of their exception, of the chosen queues. A new class on top is the "
        "cause to repair: `reliq dead list` and the worker's log have its place.",
        {
            "{{exception}}": f"sum by (exception) (rate(reliq_handler_failures_total{{{QUEUE}}}{WINDOW})) "
            'or label_replace(vector(0), "exception", "none", "", "")'
        },
        unit="mps",
    ),
    Panel(
        "Slots used",
        "Share of each worker's slots that are taken. Near 100 % while messages wait: handlers have become slow, or "
        "more processes or concurrency are needed.",
        {"{{instance}}": BUSY},
        unit="percentunit",
        limits={0.8: YELLOW, 0.95: RED},
    ),
]
FLOW = [
    flow(
        "Publish rate",
        "reliq_published_total",
        "Messages accepted per second. A drop to 0 in business hours: producers are down or cannot reach Redis.",
    ),
    flow(
        "Claim rate",
        "reliq_claimed_total",
        "Messages that workers took per second. 0 while messages wait: no worker serves the queue, or all slots are full.",
    ),
    flow(
        "Ack rate",
        "reliq_acked_total",
        "Messages that ended well per second. While it stays below the publish rate, the backlog grows.",
    ),
    flow(
        "Nack rate",
        "reliq_nacked_total",
        "Deliveries per second that failed or were rejected: see Failures by exception.",
    ),
    Panel(
        "Again after a failure",
        "Messages per second to be delivered again because a handler failed. Near the claim rate: workers do little "
        "else, see the runbook's section ReliqRetryStorm.",
        of_queues(rate("reliq_retried_total", 'cause="nack",')),
        unit="mps",
        limits={1: YELLOW, 10: RED},
    ),
    Panel(
        "Again after a lease",
        "Messages per second to be delivered again because their lease ran out: a worker died or was held up. Look at "
        "Restarts and Late renewals.",
        of_queues(rate("reliq_retried_total", 'cause="lease",')),
        unit="mps",
        limits={1: YELLOW, 10: RED},
    ),
    Panel(
        "Other ends and moves",
        "Messages of the chosen queues per second. Expired above 0: work that was never done, because its TTL passed "
        "before a worker was free, or something deleted keys.",
        {one: f"sum({rate(f'reliq_{one}_total')})" for one in ENDS},
        unit="mps",
        colours=KINDS,
    ),
    Panel(
        "The account",
        "What Redis counted since the queue began, exact. Published + redriven = acked + dead + expired + cancelled + "
        "purged + alive. Missing other than 0: keys were changed by hand, or Redis lost data. Go's programs count nothing.",
        {one: account(one) for one in ACCOUNT}
        | {"alive": f"max by (queue) (sum without (state) (reliq_messages{{{QUEUE}}}))"}
        | {"missing": f"{gauge('reliq_account_missing')} != 0 or min by (queue) (reliq_account_missing{{{QUEUE}}})"}
        | {"map": gauge("reliq_shard_map_lost"), "layout": gauge("reliq_shared")},
        "table",
        24,
        8,
        columns=(
            Column("queue", label=True),
            *(Column(one, max(86, 14 + 9 * len(one))) for one in (*ACCOUNT, "alive")),
            Column("missing", 85, limits={-1e15: RED, 0: "transparent", 1: RED}),
            Column("map", 75, mappings={"0": ("ok", "transparent"), "1": ("lost", RED)}),
            Column("layout", 75, mappings={"0": ("reliq", "transparent"), "1": ("Go", "blue")}),
        ),
    ),
]
STATE = [
    state("pending", "Messages that are not due yet, large when much is scheduled. Overdue ones count in the backlog."),
    state(
        "ready",
        "Messages that are due and wait. When it grows, workers are too slow or too few, or the queue is paused.",
        limits={1000: YELLOW, 10000: RED},
    ),
    state(
        "unack",
        "Messages under a lease or waiting after a nack. Much more than the slots of all workers: many wait for their "
        "backoff, see In backoff.",
    ),
    state(
        "retry", "Messages to be delivered again. It empties at once when workers have slots: otherwise see Backlog."
    ),
    state(
        "garbage",
        "Messages at their end that wait to become dead letters. A worker collects them within a second or so; when it "
        "grows, no worker serves the queue.",
        limits={1000: YELLOW},
    ),
    state(
        "dead",
        "Dead letters kept, old ones too. `reliq dead list` shows them; repair the cause, then `reliq dead redrive`.",
        gauge("reliq_dead_letters"),
    ),
    state(
        "Leased",
        "Of unack, messages that a worker has. Exact up to 200 a queue, estimated above. Leased without a worker: it "
        "died, and they come back when their leases end.",
        gauge("reliq_unack", 'kind="leased",'),
    ),
    state(
        "In backoff",
        "Of unack, messages that wait for their next delivery after a nack. Exact up to 200 a queue, estimated above.",
        gauge("reliq_unack", 'kind="backoff",'),
    ),
    Panel(
        "Oldest by state",
        "How long ago the first message of each state was due, of the chosen queues; of unack, how long ago its lease "
        "or wait ended. Unack above a few seconds: nobody reclaims, no worker serves the queue.",
        {"{{state}}": f"max by (state) (reliq_oldest_seconds{{{QUEUE}}})"},
        unit="s",
        limits=SLOW,
        colours=STATES,
    ),
]
KEYS = [
    Panel(
        "Waiting for a turn",
        "Messages with keys that are due and wait in the lines of their keys, of queues that have keys. When it grows: "
        "workers are too few, or limits hold messages back: `reliq keys` says which keys, and why.",
        of_queues(gauge("reliq_messages", 'state="waiting",')),
    ),
    Panel(
        "Largest keys",
        "Messages that wait, of the ten keys with most in the chosen queues, and of all others together. One key far above "
        "the others waits behind its own messages: `reliq limits` says what it may, `reliq purge --key` deletes them.",
        {"{{key}}": f"max by (key) (reliq_key_waiting{{{QUEUE}}})"},
    ),
    Panel(
        "Keys in turn and asleep",
        "How many keys wait for a worker, and how many sleep: their rate is used up, a handler asked for it, or somebody "
        "paused them. Most asleep while workers are idle: the rates are lower than what comes in.",
        {"{{state}}": f"max by (state) (reliq_keys{{{QUEUE}}})"},
    ),
    Panel(
        "Key held up for longest",
        "For how long nothing has started of the key that waits longest while it sleeps or its places are taken. Minutes: a long "
        "handler, or a rate. When it only grows: a key that was paused and forgotten, or a message that fails again and again "
        "in its order: `reliq keys` names it.",
        of_queues(gauge("reliq_key_held_up_seconds")),
        unit="s",
    ),
    flow(
        "Held back by a rate",
        "reliq_limited_claims_total",
        "Claims per second that took less than they could, for a rate was used up. Above 0 while messages wait: the rate "
        "decides how fast the queue is, and more workers would not help.",
    ),
]
PERIODIC = [
    Panel(
        "Late ticks",
        "For how long the next tick of each periodic entry has been due. Above a few seconds: no worker with the entry "
        "runs, its body fails, or it is no more in the code: `reliq cron list` says which.",
        {"{{entry}}": f"clamp_min(min by (entry) (time() - reliq_cron_next_timestamp_seconds{{{QUEUE}}}), 0)"},
        unit="s",
        limits={60: YELLOW, 300: RED},
    ),
    Panel(
        "Since the last tick",
        "How long ago each periodic entry last published. Longer than its schedule says: it is paused, its ticks are "
        "skipped or missed, or late.",
        {"{{entry}}": f"min by (entry) (time() - reliq_cron_last_timestamp_seconds{{{QUEUE}}})"},
        unit="s",
    ),
    Panel(
        "Missed and skipped ticks",
        "Ticks that nobody published in time, and those that were skipped: `paused`, or `overlap`, for the entry's last "
        "message was alive: see why it takes so long, or waits in a backoff.",
        {
            "{{entry}} missed": f"max by (entry) (increase(reliq_cron_missed_total{{{QUEUE}}}{WINDOW}))",
            "{{entry}} {{why}}": f"max by (entry, why) (increase(reliq_cron_skipped_total{{{QUEUE}}}{WINDOW}))",
        },
        bars=True,
    ),
]
