"""`Admin.doctor`: every finding with made-up server facts, and real servers with users of different rights."""

import pytest

from reliq import Admin
from reliq.admin.doctor import Finding, check_facts, merged, tls
from reliq.redis.url import address
from reliq.testing.server import EmbeddedRedis

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
    "appendfsync": "always",
    "save": "",
    "min-replicas-to-write": "1",
}
NODE = {
    "cluster_enabled": "1",
    "cluster_state": "ok",
    "cluster_slots_ok": "16384",
    "cluster-require-full-coverage": "no",
    "cluster-node-timeout": "5000",
}
#: Settings that differ from a sound server, the finding about them, and its verdict.
DIFFERENT = [
    ({"redis_version": "6.2.19"}, "version", "warning"),
    ({"redis_version": "6.2.20"}, "version", "ok"),
    ({"redis_version": "7.0.15"}, "version", "warning"),
    ({"redis_version": "7.4.6"}, "version", "ok"),
    ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, "version", "warning"),
    ({"redis_version": "7.2.4", "valkey_version": "9.0.0"}, "version", "ok"),
    ({"maxmemory_policy": "volatile-lru"}, "eviction", "bad"),
    ({"evicted_keys": "7"}, "eviction", "bad"),
    ({"used_memory": "95000000"}, "memory", "warning"),
    ({"used_memory": "100000000"}, "memory", "bad"),
    ({"used_memory": "7900000000", "maxmemory": "0"}, "memory", "warning"),
    ({"appendfsync": "everysec"}, "persistence", "warning"),
    ({"aof_enabled": "0", "save": "3600 1"}, "persistence", "warning"),
    ({"aof_enabled": "0"}, "persistence", "bad"),
    ({"aof_last_write_status": "err"}, "persistence", "bad"),
    ({"rdb_last_bgsave_status": "err"}, "persistence", "bad"),
    ({"connected_slaves": "0"}, "replicas", "warning"),
    ({"min-replicas-to-write": "0"}, "replicas", "warning"),
    ({"role": "slave"}, "replicas", "bad"),
    (NODE, "slots", "ok"),
    (NODE | {"cluster_slots_ok": "16383"}, "slots", "bad"),
    (NODE | {"cluster_state": "fail"}, "slots", "bad"),
    (NODE | {"cluster-require-full-coverage": "yes"}, "coverage", "warning"),
    (NODE | {"cluster-node-timeout": "5001"}, "node timeout", "warning"),
]


def verdicts(found):
    return {finding.name: finding.verdict for finding in found}


@pytest.mark.parametrize(("facts", "name", "verdict"), DIFFERENT, ids=str)
def test_each_fact_of_a_server_has_a_verdict(facts, name, verdict):
    found = list(check_facts(SOUND | facts))

    assert verdicts(found) == dict.fromkeys(verdicts(found), "ok") | {name: verdict}, "all others are good"
    assert all(one.verdict == "ok" or (one.means and one.mend) for one in found)


def test_facts_that_a_user_may_not_read_are_unknown():
    found = [*check_facts({}), *check_facts({"cluster_enabled": "1"})]

    assert set(verdicts(found)) >= {"version", "eviction", "memory", "persistence", "replicas", "slots", "coverage"}
    assert {one.verdict for one in found} == {"unknown"}
    assert all(one.mend for one in found)


def test_replica_of_a_cluster_needs_no_replica_of_its_own():
    assert "replicas" not in verdicts(check_facts(SOUND | NODE | {"role": "slave"}))


def test_equal_findings_of_several_servers_are_merged():
    good, bad = Finding("memory", "ok", "enough"), Finding("memory", "bad", "full", "means", "mend")
    version = Finding("version", "ok", "redis 8.2.2")

    assert merged({"a": [good, version], "b": [good, version], "c": [bad, version]}) == [
        Finding("memory", "ok", "enough (on a, b)"),
        Finding("memory", "bad", "full (on c)", "means", "mend"),
        Finding("version", "ok", "redis 8.2.2 (on each of 3)"),
    ]
    assert merged({"": [bad]}) == [bad]


def test_far_server_without_tls_is_a_warning():
    far, near, secure = "redis://10.0.0.7/0", "redis://[::1]/0", "rediss://10.0.0.7/0"

    assert [tls(address(one)).verdict for one in (far, near, secure)] == ["warning", "ok", "ok"]


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
    """Make a user with the given rules; return its `Admin`."""

    def make(*rules):
        client.execute_command("ACL", "SETUSER", "patient", "reset", *rules, "on", ">secret")
        return Admin(url.replace("redis://", "redis://patient:secret@"))

    yield make
    client.acl_deluser("patient")


def test_rights_of_a_user_are_those_of_its_rule_and_unknown_before_redis_7(patient, admin, client):
    found = verdicts(patient("-@all").doctor(roles=["producer"]))
    assert found.pop("rights: producer") == "bad"
    assert {name for name, verdict in found.items() if verdict == "ok"} == {"tls", "eval"}
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


@pytest.mark.parametrize("rule", ['rename-command CONFIG ""', "user default on nopass ~* &* +@all -config"])
def test_managed_redis_that_denies_config_is_checked_and_its_console_named(rule, server_path, tmp_path):
    (tmp_path / "service.conf").write_text(rule)
    options = {"include": str(tmp_path / "service.conf"), "maxmemory-policy": "volatile-lru"}
    with EmbeddedRedis(server=server_path, options=options) as service:
        found = {one.name: one for one in Admin(service.url).doctor(roles=["producer"])}

    where = "in redis.conf, or in the parameter group or console of a managed Redis"
    assert (found["eviction"].verdict, found["eviction"].mend) == ("bad", f"set maxmemory-policy noeviction {where}")
    assert (found["persistence"].verdict, found["persistence"].mend) == ("warning", f"set appendonly yes {where}")
    assert (found["replicas"].verdict, found["eval"].verdict) == ("warning", "warning")
