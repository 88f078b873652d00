"""Made-up data for templates: a healthy queue and others with problems."""

from reliq.admin import MinuteStats, Overview, QueueSnapshot, Rates, Worker

NOW = 1_795_336_800.0


def url(route, **params):
    return f"/{route}?" + "&".join(f"{name}={value}" for name, value in params.items())


def view(queue="orders", **fields):
    """Return the data of an idle queue, changed by `fields`."""
    states = dict.fromkeys(("pending", "ready", "unack", "retry", "garbage", "backoff", "dead"), 0)
    rest = {
        "layout": "reliq",
        "late": 0.0,
        "oldest": {},
        "overdue": 0,
        "paused": False,
        "totals": {},
        "rates": None,
        "workers": 1,
        "slots": 16,
        "busy": 0,
        "pause": None,
    }
    return QueueSnapshot(queue=queue, **(states | rest | fields))


def rates(acked=0.0, failed=0.0, arrived=0.0):
    return Rates(arrived=arrived, acked=acked, failed=failed, ended=0.0, over_seconds=60.0)


def worker(**fields):
    said = {"id": "w", "host": "shop", "pid": 7, "version": "1", "queues": ("orders",), "slots": 16, "busy": 0}
    return Worker(**(said | {"started": NOW - 60, "last_claim": NOW, "seen": NOW} | fields))


def minute(published=0, acked=0, failed=0, waiting=0, oldest=None, ago=0.0):
    return MinuteStats(NOW - ago, published, acked, failed, 0, waiting, oldest)


def overview(*views, workers=()):
    return Overview(list(views), list(workers), {}, {}, NOW)


def context(**fields):
    """Return template data that is enough for every page, extended by `fields`."""
    shared = {"url": url, "field": lambda _name: "", "route": "queues", "queue": "orders", "user": "ada"}
    shared |= {"may_write": True, "may_read_bodies": True}
    shared |= {"place": "redis://there/0", "now": NOW, "notice": "", "may_log_out": True, "show_bodies": False}
    return shared | fields
