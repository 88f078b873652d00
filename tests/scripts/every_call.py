"""Prepare a queue with messages in every state, and a call of every script that has work to do there."""

from held_clock import HOUR_MS, NOON, micros

from reliq.admin.check import check_ids, check_keys
from reliq.keys import Keys
from reliq.limits import Limit
from reliq.lua import transitions as t

LATER = micros(ms=60_000)
WINDOW_MS = 600_000
REPLACING = {"ttl_ms": HOUR_MS, "retries": 1, "span_ms": 1000, "most_ms": 100_000}


def daily_tick(minute=1, **options):
    """Return a tick of the periodic job, the given minutes after noon."""
    at = NOON // 10**6 + 60 * minute
    message = (f"cron.daily.{at}", b',"r":1}\nbody')
    return t.Tick("daily", "every 60", at, at - 60, missed=1, message=message, **options)


def staged_plan(run, keys, name, line=""):
    """Store a schedule that is due at `LATER`; return the call of its tick."""
    at, options = NOON // 10**6 + 30, {"revision": "a1", "line": line}
    run(t.plan(keys, "write", name, next=at, value=b'{}\n,"r":3}\nbody', **options, clock=NOON))
    one = t.PlanTick(f"plan.{name}.{at}", name, "a1", str(at), at + 60, HOUR_MS, 3, b',"r":3}\nbody', line)
    return t.plan_tick(keys, [one], clock=LATER)


def keyed_queue(keys):
    """Return the queue with keys that the keyed calls use."""
    return Keys(f"{keys.name}-keyed")


def stage_keyed(run, keys):
    """Fill key queues; return a call of each script that has a branch for queues with keys."""
    made = iter(range(1, 99))

    def publish(key, *ids, delay_ms=0):
        turn, names = t.CallNumber("kp", next(made)), [key] * len(ids)
        items = [(id, b',"r":3,"e":1,"w":%d}\nbody' % WINDOW_MS) for id in ids]
        options = {"ttl_ms": HOUR_MS, "retries": 3, "window_ms": WINDOW_MS, "delay_ms": delay_ms}
        return t.publish(keys, items, turn, **options, message_keys=names, clock=NOON)

    def claim(limit, lease_ms=HOUR_MS, clock=NOON):
        options = {"limit": limit, "lease_ms": lease_ms, "watcher": "me", "clock": clock}
        return t.claim(keys, t.CallNumber("kw", next(made)), **options)

    limits = {"per_key": "9", "concurrency": "99", "rate_us": "1000", "burst": "50", "weight:b": "2"}
    run(t.limit(keys, limits, declared="staged", clock=NOON))
    run(publish("a", "k-acked", "k-nacked", "k-rejected", "k-unread", "k-released", "k-snoozed", "k-cancelled"))
    by_id = {one.id: one for one in run(claim(10)).claimed}
    run(t.cancel(keys, ["k-cancelled"], clock=NOON))
    run(publish("f", "k-followed", "k-followed-stopped", "k-backoff"))
    by_id |= {one.id: one for one in run(claim(10)).claimed}
    run(t.cancel(keys, ["k-followed-stopped"], clock=NOON))
    run(t.nack(keys, [(by_id["k-backoff"], 1_800_000, "failed 1 x", b"")], clock=NOON))

    def replace(key, *ids, mode, clock):
        items = [(id, b',"r":1,"k":"%b"}\nbody' % key.encode()) for id in ids]
        turn, names = t.CallNumber("kr", next(made)), [key] * len(ids)
        return t.replace(keys, items, turn, mode=mode, **REPLACING, message_keys=names, clock=clock)

    run(replace("g", "k-followed", mode="replace", clock=NOON))
    run(replace("g", "k-followed-stopped", mode="debounce", clock=NOON))
    run(publish("b", "k-overdue"))
    run(claim(1, lease_ms=40_000))
    run(publish("c", "k-due", delay_ms=1000))
    run(publish("c", "k-waiting", "k-too"))
    run(publish("e", "k-again"))
    run(publish("", "k-moved"))
    run(t.cancel(keys, ["k-again", "k-moved"], clock=NOON))
    nacked, rejected = by_id["k-nacked"], by_id["k-rejected"]
    failures = [(nacked, 5, "failed 1 x", b""), (rejected, 0, "rejected 1 x", b"value")]
    failures.append((by_id["k-unread"], -2, "undecodable 1 x", b""))
    return {
        "ack": t.ack(keys, [(by_id["k-acked"], WINDOW_MS)], history=5, took_ms=[7], clock=LATER),
        "claim": claim(10, lease_ms=1000, clock=LATER),
        "nack": t.nack(keys, [*failures, (by_id["k-cancelled"], 0, "failed 1 x", b"")], clock=LATER),
        "plan_tick": staged_plan(run, keys, "hourly", "p"),
        "promote": t.promote(keys, clock=LATER),
        "publish": publish("d", "k-new", "k-again", "k-moved").at(LATER),
        "reclaim": t.reclaim(keys, clock=LATER),
        "release": t.release(keys, [by_id["k-released"], by_id["k-cancelled"]], sleep_ms=5000, clock=LATER),
        "replace": replace("h", "k-new", "k-backoff", "k-waiting", "k-due", "k-again", mode="throttle", clock=LATER),
        "snooze": t.snooze(keys, [(by_id["k-snoozed"], 5), (by_id["k-cancelled"], 5)], clock=LATER),
        "succeed": t.succeed(keys, [by_id["k-followed"], by_id["k-followed-stopped"]], kind="acked", clock=LATER),
    }


def stage(run, client, keys):
    """Fill the queue; return a call of each script by name, all for the time `LATER`."""
    keyed = {f"{name} (keyed)": call for name, call in stage_keyed(run, keyed_queue(keys)).items()}
    publisher, worker = iter(range(1, 99)), iter(range(1, 99))

    def publish(*ids, retries=3, delay_ms=0):
        items = [(id, b',"r":%d,"e":1,"w":%d}\nbody' % (retries, WINDOW_MS)) for id in ids]
        options = {"ttl_ms": HOUR_MS, "retries": retries, "delay_ms": delay_ms, "window_ms": WINDOW_MS, "clock": NOON}
        return t.publish(keys, items, t.CallNumber("p", next(publisher)), **options)

    def claim(*ids, lease_ms=HOUR_MS):
        run(publish(*ids))
        options = {"limit": len(ids), "lease_ms": lease_ms, "clock": NOON}
        claimed = run(t.claim(keys, t.CallNumber("w", next(worker)), **options)).claimed
        assert len(claimed) == len(ids)
        return claimed

    held = claim("acked", "nacked", "rejected", "unread", "extended", "released", "snoozed", "cancelled-running")
    held += claim("followed", "followed-stopped")
    run(t.cancel(keys, ["followed-stopped"], clock=NOON))
    for number, id in enumerate(("followed", "followed-stopped")):
        mode = ("replace", "debounce")[number]
        run(
            t.replace(keys, [(id, b',"r":1}\nbody')], t.CallNumber("r", number + 1), mode=mode, **REPLACING, clock=NOON)
        )
    run(t.cancel(keys, ["cancelled-running"], clock=NOON))
    waiting, *dying = claim("waiting", "died", "died-too", "in-garbage", "purged")
    run(t.nack(keys, [(waiting, 1_800_000, "failed 1 x", b"")], clock=NOON))
    values = [client.get(keys.msg(one.id)) for one in dying]
    run(t.nack(keys, [(one, 0, "rejected 1 x", v) for one, v in zip(dying, values, strict=True)], clock=NOON))
    run(t.collect(keys, ["died", "died-too"], dead_letter_limit=100, letters_ms=10**12))
    claim("in-retry", lease_ms=20_000)
    run(t.reclaim(keys, clock=micros(ms=20_000)))
    claim("overdue", lease_ms=40_000)
    run(publish("due", delay_ms=1000))
    run(publish("pending", "cancelled", "moved", "leaving", delay_ms=3_000_000))
    client.persist(keys.msg("leaving"))  # it expires by the server's clock, which is not held
    run(publish("ready", "ready-too", "no-count"))
    run(t.cancel(keys, ["never-seen"], clock=NOON))
    client.delete(keys.wake, keys.watch)
    client.hdel(keys.retries_left, "no-count")
    client.zadd(keys.held, {"a\0nobody": 0})
    run(t.register(keys, [("daily", "every 60")], newest=True, clock=NOON))
    letters = [(name.decode(), letter[b"id"].decode(), 3) for name, letter in client.xrange(keys.dead)]
    seen = run(check_ids(keys, ["no-count"], part="both"))[1][0][-1]
    wish = {"no-count": [seen, "=", "", 0, "=", "", ""]}
    by_id = {one.id: one for one in held}
    other = keys.of_shard(1)
    run(t.publish(other, [("away", b',"r":3}\nbody')], t.CallNumber("p", 1), ttl_ms=3_600_000, retries=3, clock=NOON))
    away = run(t.depart(other, ["away"], state="ready", clock=NOON))
    failures = [(by_id["nacked"], 5, "failed 1 x", b""), (by_id["rejected"], 0, "rejected 1 x", b"value")]
    failures += [(by_id["unread"], -2, "undecodable 1 x", b""), (by_id["cancelled-running"], 0, "failed 1 x", b"")]
    new = [(id, b"body") for id in ("new", "due", "never-seen")]
    replaced = [(id, b"body") for id in ("new", "pending", "waiting", "ready", "cancelled-running", "never-seen")]
    chosen = {"ttl_ms": 1000, "retries": 1, "delay_ms": 1, "window_ms": 1}
    watching = {"first": "retry", "watcher": "me"}
    kept = {"results": ["1 1 null"], "keep_ms": 60_000}
    return {
        "ack": t.ack(keys, [(by_id["acked"], WINDOW_MS)], history=5, took_ms=[7], **kept, clock=LATER),
        "arrive": t.arrive(keys, away, ["away"], origin=1, clock=LATER),
        "ask": t.ask(keys, ["cancelled-running", "died", "ready", "unknown"], fence="2 4 2", closing=True, clock=LATER),
        "book": t.book(Limit("api", rate="1/s"), 1, clock=LATER),
        "bodies": t.bodies(keys, ["ready", "unknown"], max_body=1000, clock=LATER),
        "cancel": t.cancel(keys, ["cancelled", "waiting", "ready", "extended", "unknown"], clock=LATER),
        "check": check_ids(keys, ["no-count"], part="both", wishes=wish, clock=LATER),
        "check_keys": check_keys(keys, [("a", "nobody"), ("a", "extended"), ("b", "")], repair=True, clock=LATER),
        "checkpoint": t.checkpoint(keys, [(by_id["extended"], 1, '"1 0 7"')], clock=LATER),
        "claim": t.claim(keys, t.CallNumber("w", 99), limit=10, lease_ms=1000, **watching, clock=LATER),
        "collect": t.collect(keys, ["in-garbage"], dead_letter_limit=2, letters_ms=10**12, clock=LATER),
        "counts": t.counts(keys),
        "depart": t.depart(keys, ["leaving"], state="pending", clock=LATER),
        "extend": t.extend(keys, [by_id["extended"], by_id["cancelled-running"]], lease_ms=1000, clock=LATER),
        "forget": t.forget(keys, letters=True, clock=LATER),
        "held_up": t.held_up(keys, most=9, clock=LATER),
        "leave": t.leave(other, away, clock=LATER),
        "limit": t.limit(keyed_queue(keys), {"per_key": "3", "weight:a": "3", "weight:b": ""}, clock=LATER),
        "key_queues": t.key_queues(keys, clock=LATER),
        "nack": t.nack(keys, failures, clock=LATER),
        "plan": t.plan(keys, "write", "new", revision="b2", next=NOON // 10**6 + 90, value=b"{}\n\n", clock=LATER),
        "plan_due": t.plan_due(keys, limit=9, clock=LATER),
        "plan_tick": staged_plan(run, keys, "hourly"),
        "promote": t.promote(keys, clock=LATER),
        "publish": t.publish(keys, new, t.CallNumber("p", 99), **chosen, clock=LATER),
        "purge": t.purge(keys, ["purged"], state="garbage", clock=LATER),
        "reclaim": t.reclaim(keys, clock=LATER),
        "redrive": t.redrive(keys, letters, ttl_ms=1000, delay_ms=1, clock=LATER),
        "register": t.register(keys, [("daily", "every 60"), ("new", "every 5")], clock=LATER),
        "release": t.release(keys, [by_id["released"], by_id["cancelled-running"]], clock=LATER),
        "replace": t.replace(keys, replaced, t.CallNumber("r", 99), mode="throttle", **REPLACING, clock=LATER),
        "remap": t.remap(keys, b"", b'{"epoch":1,"n":2,"was":1,"state":"growing"}', clock=LATER),
        "reschedule": t.reschedule(keys, ["moved", "waiting", "ready-too", "extended"], delay_ms=1, clock=LATER),
        "sleep": t.sleep(keys, "tenant", for_ms=60_000, clock=LATER),
        "snooze": t.snooze(keys, [(by_id["snoozed"], 5), (by_id["cancelled-running"], 5)], clock=LATER),
        "status": t.status(keys, "extended", clock=LATER),
        "succeed": t.succeed(keys, [by_id["followed"], by_id["followed-stopped"]], kind="nacked", clock=LATER),
        "tick": t.tick(keys, daily_tick(due_ms=LATER // 1000 + 5), ttl_ms=1000, retries=1, clock=LATER),
        "tidy": t.tidy(keys, clock=micros(ms=-7_200_000)),
        **keyed,
    }
