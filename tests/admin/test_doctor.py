"""`Admin.doctor`: every finding, by what a server tells; and real servers, asked by users of many rights."""

import json

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typed import reliq

from reliq import Admin, ConfigurationError, RedisUnavailableError
from reliq.admin.doctor.facts import Facts
from reliq.admin.doctor.findings import SLOW_MICROSECONDS, findings

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
    ({"redis_version": "7.2.10"}, {}, "lua", "warning"),
    ({"redis_version": "7.4.6"}, {}, "lua", "ok"),
    ({"redis_version": "8.4.0"}, {}, "lua", "ok"),
    ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, {}, "lua", "warning"),
    ({"redis_version": "7.2.4", "valkey_version": "9.0.0"}, {}, "lua", "ok"),
    ({"maxmemory_policy": "volatile-lru"}, {}, "eviction", "bad"),
    ({"evicted_keys": "7"}, {}, "evicted", "bad"),
    ({"used_memory": "95000000"}, {}, "memory", "warning"),
    ({"used_memory": "100000000"}, {}, "memory", "bad"),
    ({"used_memory": "7900000000", "maxmemory": "0"}, {}, "memory", "warning"),
    ({}, {"appendfsync": "everysec"}, "persistence", "warning"),
    ({}, {"appendfsync": "no"}, "persistence", "warning"),
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


def test_a_sound_server_has_nothing_but_good_findings():
    assert set(verdicts(findings(facts())).values()) == {"ok"}


@pytest.mark.parametrize(("info", "config", "name", "verdict"), TOLD)
def test_what_a_server_tells_is_judged(info, config, name, verdict):
    found = findings(facts(info, config))

    expected = dict.fromkeys(verdicts(found), "ok") | {name: verdict}
    assert {**verdicts(found), "lua": expected["lua"]} == expected
    [finding] = [one for one in found if one.name == name]
    assert finding.verdict == "ok" or (finding.means and finding.mend), (
        "a finding says what it means and how to mend it"
    )


@pytest.mark.parametrize(
    ("others", "name", "verdict"),
    [
        ({"slow_scripts": [12_000, 50_000]}, "slow scripts", "warning"),
        ({"clock_offset": 30.0}, "clock", "warning"),
        ({"clock_offset": -30.0}, "clock", "warning"),
        ({"hosts": ["redis.example"]}, "tls", "warning"),
        ({"hosts": ["10.0.0.7"]}, "tls", "warning"),
        ({"hosts": ["10.0.0.7"], "is_secure": True}, "tls", "ok"),
        ({"hosts": ["127.0.0.1", "::1", "localhost"]}, "tls", "ok"),
        ({"client_retries": 3}, "client retries", "warning"),
        ({"denied": {"consumer": ["ZADD"]}}, "rights: consumer", "bad"),
    ],
)
def test_what_is_found_beside_is_judged(others, name, verdict):
    assert verdicts(findings(facts(**others)))[name] == verdict


def test_what_is_not_told_is_unknown_and_never_passed():
    found = verdicts(findings(Facts(denied={"consumer": None})))

    assert {name for name, verdict in found.items() if verdict == "ok"} == {"tls", "client retries"}
    assert set(found.values()) == {"ok", "unknown"}


# ---- real servers -----------------------------------------------------------


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
def login(client, url):
    """Make a user with some rules; return its URL."""

    def make(*rules):
        client.execute_command("ACL", "SETUSER", "patient", "reset", *rules, "on", ">secret")
        return url.replace("redis://", "redis://patient:secret@")

    yield make
    client.execute_command("ACL", "DELUSER", "patient")


def test_a_server_is_asked_and_what_changes_is_seen(url, configured):
    before = verdicts(Admin(url).doctor())
    configured(maxmemory_policy="allkeys-lru")

    after = verdicts(Admin(url).doctor())

    assert "unknown" not in before.values()
    assert (before["eviction"], after["eviction"]) == ("ok", "bad")


def test_a_slow_script_is_found_in_the_slow_log(url, configured, client):
    while not client.slowlog_get(128) or max(one["duration"] for one in client.slowlog_get(128)) >= SLOW_MICROSECONDS:
        client.slowlog_reset()  # the server itself may be held up
        configured(slowlog_log_slower_than="0")
        client.eval("return 1", 0)
        configured(slowlog_log_slower_than="-1")

    [slow] = [finding for finding in Admin(url).doctor() if finding.name == "slow scripts"]

    assert slow.verdict == "ok", "a quick script in the log is no slow one"


def test_a_user_who_may_read_nothing_is_told_that_nothing_is_known(login):
    found = verdicts(Admin(login("-@all")).doctor(roles=["producer"]))

    assert found.pop("rights: producer") == "bad"
    assert {name for name, verdict in found.items() if verdict == "ok"} == {"tls", "client retries", "eval"}
    assert set(found.values()) == {"ok", "unknown"}


def test_a_user_with_the_rule_of_a_role_has_its_rights_and_no_others(login, url):
    rules = Admin(url).acl(["producer"], ["q"]).rules
    # Before 7.0 a user must be allowed to read its own rule.
    as_producer = Admin(login(*rules, "+acl"))

    found = verdicts(as_producer.doctor(roles=["producer", "consumer"], queue="q"))

    assert found["rights: producer"] == "ok"
    assert found["rights: consumer"] == "bad"


def test_a_user_of_everything_has_every_right(url):
    found = verdicts(Admin(url).doctor(roles=["producer", "consumer", "operator", "exporter"], queue="q"))

    assert {verdict for name, verdict in found.items() if name.startswith("rights")} == {"ok"}


def test_a_right_that_is_missing_is_named(login):
    found = Admin(login("+@all", "~*", "-zadd")).doctor(roles=["producer"])

    [rights] = [finding for finding in found if finding.name == "rights: producer"]
    assert (rights.verdict, rights.what) == ("bad", "this user may not ZADD")


def test_a_client_that_repeats_commands_by_itself_is_told(url):
    with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 4)) as theirs:
        [finding] = [one for one in Admin(theirs).doctor() if one.name == "client retries"]

    assert finding.verdict == "warning"
    assert "up to 4 times" in finding.what


def test_a_client_that_repeats_nothing_is_well(url):
    with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as theirs:
        assert verdicts(Admin(theirs).doctor())["client retries"] == "ok"


def test_a_server_that_is_away_is_an_error_and_no_finding(monkeypatch):
    monkeypatch.setattr("reliq.admin.session.PATIENCE_SECONDS", 0.05)
    with pytest.raises(RedisUnavailableError):
        Admin("redis://127.0.0.1:1/0").doctor()


def test_a_role_that_is_none_is_refused(url):
    with pytest.raises(ConfigurationError, match="^a role must be one of "):
        Admin(url).doctor(roles=["boss"])


def test_the_command_says_what_it_means_and_exits_by_what_is_bad(url, configured, client):
    client.config_resetstat()
    configured(appendonly="yes")
    well = reliq("doctor", url=url)
    strict = reliq("doctor", "--strict", "--json", url=url)
    configured(maxmemory_policy="volatile-ttl")
    bad = reliq("doctor", "--role", "consumer", url=url)

    assert well[0] == 0
    assert strict[0] == 1
    assert {"name", "verdict", "what", "means", "mend"} == set(json.loads(strict[1])[0])
    assert bad[0] == 1
    assert "bad      eviction: maxmemory-policy is volatile-ttl\n         means: " in bad[1]
    assert "mend: CONFIG SET maxmemory-policy noeviction" in bad[1]


def test_the_command_is_one_line_when_redis_is_away(monkeypatch):
    monkeypatch.setattr("reliq.admin.session.PATIENCE_SECONDS", 0.05)
    code, out, error = reliq("doctor", url="redis://127.0.0.1:1/0")

    assert (code, out, error.count("\n")) == (1, "", 1)
