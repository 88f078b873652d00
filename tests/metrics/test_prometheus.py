"""A real Prometheus scrapes a worker of two processes and an exporter; every panel shows what really happened."""

import math

import pytest
from panels import QUERIES, filled
from patience import eventually
from ports import free_port

MOODS = ["good"] * 60 + ["flaky"] * 5 + ["poison"] * 7
PUBLISHED, ACKED, POISON, FLAKY, KILLED = 74, 66, 7, 5, 1


#: All that is waited for, one after the other, on a machine that is busy.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def story(jobs, worker, command, prometheus):
    """What happened: messages were published, some failed, some died, one killed its process; Prometheus saw it all."""
    _, port = worker()
    other = free_port()
    command("exporter", "--port", str(other))
    running = prometheus(worker=port, exporter=other)
    eventually(lambda: running.ask('count(reliq_published_total{queue="shop"} == 0) == 2'), "both were scraped before")
    jobs.SHOP.publish_many(MOODS)
    jobs.SHOP.publish("later", delay=600)
    eventually(lambda: jobs.SHOP.counts().totals.get("acked") == ACKED - KILLED, "all but the killer are handled")
    jobs.SHOP.publish("killer")
    eventually(lambda: jobs.SHOP.counts().totals.get("acked") == ACKED, "the killer was delivered again")
    jobs.BLOCKED.publish_many([3600, 3600])

    def is_told():
        if not running.ask(f'min(reliq_dead_letters{{queue="shop"}}) == {POISON}'):
            return False
        done = running.ask(f'min(reliq_acked_total{{queue="shop"}}) == {ACKED} and min(reliq_workers) == 2')
        return done and running.ask('sum(reliq_inflight{phase="running"}) == 2 and sum(reliq_slots) == 32')

    eventually(is_told, "everything was handled and scraped, and the dead process was replaced")
    return running


def test_every_panel_returns_data_that_agrees_with_what_was_published_acked_and_killed(story):
    answers = {title: story.ask(filled(query)) for title, _, query in QUERIES}

    assert {title for title, answer in answers.items() if not any(map(math.isfinite, answer.values()))} == set()
    shop = (("queue", "shop"),)
    told = {title: answer.get(shop, answer.get(())) for title, answer in answers.items()}
    account = {kind: told[f"The account: {kind}"] for kind in ("published", "acked", "dead", "expired", "redriven")}
    assert account == {"published": PUBLISHED, "acked": ACKED, "dead": POISON, "expired": 0, "redriven": 0}
    assert told["pending: {{queue}}"] == 1
    assert told["Dead letters: {{queue}}"] == told["dead: {{queue}}"] == POISON
    assert [told[f"{state}: {{{{queue}}}}"] for state in ("ready", "unack", "retry", "garbage")] == [0, 0, 0, 0]
    assert answers["unack: {{queue}}"][("queue", "blocked"),] == 2
    assert answers["Unack by kind: {{queue}} {{kind}}"][("kind", "leased"), ("queue", "blocked")] == 2
    assert answers["In flight: {{phase}}"][("phase", "running"),] == 2
    assert answers["Restarts: {{reason}}"][("reason", "crashed"),] == KILLED
    assert sum(answers["Restarts: {{reason}}"].values()) == KILLED
    assert sum(answers["Worker processes: {{instance}}"].values()) == 2
    assert set(answers["Redis up: {{instance}}"].values()) == {1}
    assert told["Slots used: used"] == 2 / 32
    assert told["Error ratio: {{queue}}"] == pytest.approx((POISON + FLAKY) / (ACKED + POISON + FLAKY), rel=0.3)
    assert answers["Redeliveries: {{queue}} after {{cause}}"][("cause", "lease"), ("queue", "shop")] > 0
    assert told["Handler time p99: {{queue}}"] < told["Longest running handler: longest"]
    # `increase` stretches to the window's ends: the plain difference of first and last sample is exact.
    grown = {name: _grown(story, name) for name in ("published", "acked", "nacked")}
    assert grown == {"published": PUBLISHED, "acked": ACKED, "nacked": POISON + FLAKY}
    assert _grown(story, "retried", 'cause="nack"') == FLAKY
    assert _grown(story, "retried", 'cause="lease"') == KILLED


def _grown(story, name, more=""):
    series = f'reliq_{name}_total{{queue="shop",job="worker",{more}}}'
    (answer,) = story.ask(f"max_over_time({series}[10m]) - min_over_time({series}[10m])").values()
    return answer


def test_prometheus_takes_every_rule_and_no_alert_fires_over_an_idle_exporter(command, prometheus, jobs):
    port = free_port()
    command("exporter", "--port", str(port), "--queue", "shop")
    running = prometheus(exporter=port)

    def evaluated():
        groups = running.api("rules")["groups"]
        return groups and all(rule["health"] == "ok" for group in groups for rule in group["rules"]) and groups

    groups = eventually(evaluated, "every rule was evaluated and found good")

    firing = [rule["name"] for group in groups for rule in group["rules"] if rule.get("state") == "firing"]
    assert firing == []
