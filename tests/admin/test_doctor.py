"""`Admin.doctor`: every finding, by what a server tells; and real servers, asked by users of many rights."""

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from reliq import Admin
from reliq.admin.doctor import SLOW_MICROSECONDS, Facts, findings

SOUND = {
    "redis_version": "8.2.2",
    "maxmemory_policy": "noeviction",
    "evicted_keys": "0",
    "used_memory": "1000000",
    "maxmemory": "100000000",
    "total_system_memory": "8000000000",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "role": "master",
    "connected_slaves": "1",
}
CONFIG = {"appendfsync": "always", "save": "", "min-replicas-to-write": "1"}
#: What is told, and the finding that says so.
TOLD = [
    ({"redis_version": "6.0.16"}, {}, "version", "bad"),
    ({"redis_version": "6.2.19"}, {}, "lua", "warning"),
    ({"redis_version": "6.2.20"}, {}, "lua", "ok"),
    ({"redis_version": "7.0.15"}, {}, "lua", "warning"),
    ({"redis_version": "7.4.6"}, {}, "lua", "ok"),
    ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, {}, "lua", "warning"),
    ({"redis_version": "7.2.4", "valkey_version": "9.0.0"}, {}, "lua", "ok"),
    ({"maxmemory_policy": "volatile-lru"}, {}, "eviction", "bad"),
    ({"evicted_keys": "7"}, {}, "evicted", "bad"),
    ({"used_memory": "95000000"}, {}, "memory", "warning"),
    ({"used_memory": "100000000"}, {}, "memory", "bad"),
    ({"used_memory": "7900000000", "maxmemory": "0"}, {}, "memory", "warning"),
    ({}, {"appendfsync": "everysec"}, "persistence", "warning"),
    ({"aof_enabled": "0"}, {"save": "3600 1"}, "persistence", "warning"),
    ({"aof_enabled": "0"}, {}, "persistence", "bad"),
    ({"aof_last_write_status": "err"}, {}, "persistence", "bad"),
    ({"rdb_last_bgsave_status": "err"}, {}, "persistence", "bad"),
    ({"connected_slaves": "0"}, {}, "replicas", "warning"),
    ({}, {"min-replicas-to-write": "0"}, "replicas", "warning"),
    ({"role": "slave"}, {}, "replicas", "bad"),
]


def facts(info=None, config=None, **others):
    told = {"slow_scripts": [], "clock_offset": 0.0, "denied": {"consumer": []}} | others
    return Facts(info=SOUND | (info or {}), config=CONFIG | (config or {}), **told)


def verdicts(found):
    return {finding.name: finding.verdict for finding in found}


@pytest.mark.parametrize(("info", "config", "name", "verdict"), TOLD, ids=str)
def test_each_fact_of_a_server_has_a_verdict(info, config, name, verdict):
    found = findings(facts(info, config))

    expected = dict.fromkeys(verdicts(found), "ok") | {name: verdict}
    assert {**verdicts(found), "lua": expected["lua"]} == expected, "all others are good"
    assert all(one.verdict == "ok" or (one.means and one.mend) for one in found)


BESIDE = [
    ({"slow_scripts": [12_000, 50_000]}, "slow scripts", "warning"),
    ({"clock_offset": 30.0}, "clock", "warning"),
    ({"clock_offset": -30.0}, "clock", "warning"),
    ({"hosts": ["10.0.0.7"]}, "tls", "warning"),
    ({"hosts": ["10.0.0.7"], "is_secure": True}, "tls", "ok"),
    ({"hosts": ["127.0.0.1", "::1", "localhost"]}, "tls", "ok"),
    ({"client_retries": 3}, "client retries", "warning"),
    ({"denied": {"consumer": ["ZADD"]}}, "rights: consumer", "bad"),
    ({"denied": {"consumer": None}}, "rights: consumer", "unknown"),
]


def test_each_fact_beside_the_server_has_a_verdict():
    assert [(others, name, verdicts(findings(facts(**others)))[name]) for others, name, _ in BESIDE] == BESIDE
    told_nothing = verdicts(findings(Facts(denied={"consumer": None})))
    assert {name for name, verdict in told_nothing.items() if verdict != "unknown"} == {"tls", "client retries"}


@pytest.fixture
def configured(client):
    """Set parameters of the server for one test."""
    before = {}

    def set_all(**parameters):
        for name, value in parameters.items():
            key = name.replace("_", "-")
            before.setdefault(key, client.config_get(key)[key])
            client.config_set(key, value)

    yield set_all
    for name, value in before.items():
        client.config_set(name, value)


@pytest.fixture
def patient(client, url):
    """Make a user with some rules; return its view of the server."""

    def make(*rules):
        client.execute_command("ACL", "SETUSER", "patient", "reset", *rules, "on", ">secret")
        return Admin(url.replace("redis://", "redis://patient:secret@"))

    yield make
    client.acl_deluser("patient")


def test_quick_script_in_the_slow_log_is_no_slow_script(admin, configured, client):
    while not client.slowlog_get(128) or max(one["duration"] for one in client.slowlog_get(128)) >= SLOW_MICROSECONDS:
        client.slowlog_reset()  # the server itself may be held up
        configured(slowlog_log_slower_than="0")
        client.eval("return 1", 0)
        configured(slowlog_log_slower_than="-1")

    assert verdicts(admin.doctor())["slow scripts"] == "ok"


def test_rights_of_a_user_are_those_of_its_rule_and_unknown_before_redis_7(patient, admin, client):
    found = verdicts(patient("-@all").doctor(roles=["producer"]))
    assert found.pop("rights: producer") == "bad"
    assert {name for name, verdict in found.items() if verdict == "ok"} == {"tls", "client retries", "eval"}
    assert set(found.values()) == {"ok", "unknown"}

    rules = admin.acl(["producer"], ["q"]).rules
    found = verdicts(patient(*rules).doctor(roles=["producer", "consumer"], queue="q"))
    if int(client.info("server")["redis_version"].split(".")[0]) < 7:
        assert (found["rights: producer"], found["rights: consumer"]) == ("unknown", "unknown")
        return
    assert (found["rights: producer"], found["rights: consumer"]) == ("ok", "bad")

    found = patient("+@all", "~*", "-zadd").doctor(roles=["producer"])
    [rights] = [finding for finding in found if finding.name == "rights: producer"]
    assert (rights.verdict, rights.what) == ("bad", "this user may not ZADD")

    found = verdicts(admin.doctor(roles=["producer", "consumer", "operator", "exporter"], queue="q"))
    assert {verdict for name, verdict in found.items() if name.startswith("rights")} == {"ok"}


@pytest.mark.parametrize(("retries", "verdict"), [(4, "warning"), (0, "ok")], ids=["4 retries", "none"])
def test_doctor_reports_the_retries_of_a_client(url, retries, verdict):
    with redis.Redis.from_url(url, retry=Retry(NoBackoff(), retries)) as theirs:
        [finding] = [one for one in Admin(theirs).doctor() if one.name == "client retries"]

    assert (finding.verdict, "up to 4 times" in finding.what) == (verdict, retries == 4)


def test_doctor_prints_findings_and_exits_by_the_worst(command, configured, client):
    client.config_resetstat()
    configured(appendonly="yes")
    well, strict = command("doctor"), command("doctor", "--strict", "--json")
    configured(maxmemory_policy="volatile-ttl")
    bad = command("doctor", "--role", "consumer")

    assert (well.code, strict.code, bad.code) == (0, 1, 1)
    assert {"name", "verdict", "what", "means", "mend"} == set(strict.json[0])
    found = {one["name"]: one["verdict"] for one in strict.json}
    assert ("unknown" in found.values(), found["eviction"]) == (False, "ok")
    assert "bad      eviction: maxmemory-policy is volatile-ttl\n         means: " in bad.out
    assert "mend: CONFIG SET maxmemory-policy noeviction" in bad.out
