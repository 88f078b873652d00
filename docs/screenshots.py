"""
Make the pictures of docs/images from the pages of a made-up shop.

Install pillow, then run `PYTHONPATH=.:tests:tests/web python docs/screenshots.py`. The pictures show the real web pages with
made-up numbers, so they change only when the pages change.
"""

from __future__ import annotations

import io
import math
import random
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chromium import chromium
from made_up import NOW, context, minute, rates, view, worker
from PIL import Image

from reliq.admin import CronState, HandlerStack, MessageView, Overview, Running, RunningJob, StackReport, WorkerView
from reliq.message import DEATH_REASONS, Pause
from reliq.web.render import TEMPLATES, templates

if TYPE_CHECKING:
    from jinja2 import Environment
    from playwright.sync_api import Route

IMAGES = Path(__file__).parent / "images"
ORIGIN = "http://reliq.example"
CONNECT = "ConnectError at shop/payments.py:88"
CHANCE = random.Random(4)


def record(**fields: Any) -> SimpleNamespace:
    """Return an object with these fields."""
    return SimpleNamespace(**fields)


def hour(level: float, fails: float = 0.0, oldest: float = 0.2, stopped: int = 60) -> list[Any]:
    """Return the statistics of each minute of an hour: about `level` messages a second; workers stop at minute `stopped`."""
    rows = []
    for past in range(60):
        came = level * 60 * (1 + 0.4 * math.sin(past / 9) + CHANCE.uniform(-0.1, 0.1))
        waited = CHANCE.uniform(0.2, 1) * oldest if past < stopped else (past - stopped + 1) * 60
        acked = came * CHANCE.uniform(0.93, 1.02) if past < stopped else 0
        failed = came * fails * CHANCE.uniform(0.4, 1.6)
        rows.append(minute(round(came), round(acked), round(failed), 1, waited, ago=60 * (59 - past)))
    return rows


def made_ids(count: int) -> list[str]:
    """Return ids like those of reliq."""
    return [f"0M3XKQ7T9W{number:02d}VJ5RN8PAZ2C" for number in range(count)]


ORDERS = view(
    pending=18_240,
    ready=12,
    unack=22,
    backoff=8,
    retry=3,
    dead=106,
    rates=rates(40.9, 0.8, 41.6),
    late=0.4,
    workers=2,
    slots=32,
    busy=14,
    oldest={"ready": 0.4, "retry": 0.1},
)
VIEWS = [
    view("emails", pending=20, unack=5, rates=rates(3.4, 0, 3.4), workers=2, slots=32, busy=5),
    view("invoices", ready=1833, dead=4, rates=rates(0, 0, 2.1), late=870.0, workers=0, slots=0),
    ORDERS,
    view(
        "payments",
        pending=3,
        ready=240,
        unack=8,
        retry=6,
        dead=31,
        rates=rates(8.2, 1.4, 9.1),
        late=72.0,
        slots=8,
        busy=8,
    ),
    view(
        "reports", pending=3, ready=51, rates=rates(0, 0, 0.2), late=640.0, pause=Pause("grace", NOW, "warehouse moves")
    ),
    view("thumbnails", unack=2, rates=rates(1.2, 0, 1.2), slots=4, busy=2),
]
HOURS = {
    "emails": hour(3.4),
    "invoices": hour(2.1)[:46],  # no worker stored the later minutes
    "orders": hour(41, 0.02),
    "payments": hour(9, 0.15, oldest=80),
    "reports": hour(0.2, stopped=49),
    "thumbnails": hour(1.2),
}
RUNNING = [
    Running("orders", id, 1, NOW - 3, 4.1 - at / 2, "w", "shop-1", 4121, NOW) for at, id in enumerate(made_ids(6))
]
BEGAN = NOW - 412


def event(after: float, kind: str, *fields: Any) -> SimpleNamespace:
    """Return an event in the history of a message; `fields` are attempt, by, reason, raised, error and took."""
    rest = (None, "", "", "", "", None)
    names = ("attempt", "by", "reason", "raised", "error", "took")
    return record(at=BEGAN + after, kind=kind, **dict(zip(names, (*fields, *rest[len(fields) :]), strict=True)))


EVENTS = [
    event(0, "published", None, "web-2:811"),
    event(30, "due"),
    event(30, "claimed", 1, "shop-1:4121"),
    event(32, "failed", 1, "shop-1:4121", "failed", CONNECT, "ConnectError: pay.example refused", 2.04),
    event(35, "claimed", 2, "shop-1:4122"),
    event(65, "failed", 2, "shop-1:4122", "failed", "TimeoutError at shop/payments.py:91", "", 30.0),
    event(71, "claimed", 3, "shop-1:4121"),
    event(72, "failed", 3, "shop-1:4121", "failed", CONNECT, "ConnectError: pay.example refused", 0.8),
    event(72, "dead", 3, "", "failed", CONNECT),
]
BODY = b'{"number":4711,"customer":"ada@example.com","total":"129.00 EUR"}'
MESSAGE = MessageView(
    "order-4711",
    "dead",
    when=BEGAN + 72,
    attempt=3,
    retries_left=0,
    headers={"tenant": "acme"},
    size=len(BODY),
    body=BODY,
    queue="orders",
    taken_seconds=3300.0,
)
SHOWN = record(**{one.name: getattr(MESSAGE, one.name) for one in fields(MESSAGE)}, timeline=EVENTS)
GROUPS = [
    record(reason=reason, raised=raised, count=count, newest=NOW - age, example=id)
    for reason, raised, count, age, id in (
        ("failed", CONNECT, 74, 340, "order-4711"),
        ("rejected", "Reject at shop/jobs.py:14", 19, 3000, made_ids(2)[1]),
        ("lease", "", 9, 90_000, made_ids(3)[2]),
        ("failed", "TimeoutError at shop/stock.py:51", 4, 190_000, made_ids(4)[3]),
    )
]
LETTERS = [
    record(id=group.example, when=group.newest, attempt=13, reason=group.reason, raised=group.raised)
    for group in GROUPS
]
WORKERS = [
    worker(id="a", busy=9, running=tuple(RunningJob("orders", id, 1, NOW - 3) for id in made_ids(9))),
    worker(id="b", busy=8),
    worker(id="c", busy=8, slots=8),
    worker(id="d", busy=2, slots=4),
]


def entry(name: str, schedule: str, ticks_in: float, last: float, **fields: Any) -> CronState:
    """Return a healthy periodic job, changed by `fields`."""
    rest = {"late": 0.0, "is_served": True, "last_id": "", "is_alive": False, "missed": 0, "pause": None}
    rest |= {
        "seen": round(NOW),
        "last": round(NOW - last),
        "queue": "orders",
        "layout": "reliq",
        "skipped": {"paused": 0, "overlap": 0},
    } | fields
    return CronState(name=name, schedule=schedule, next=round(NOW + ticks_in), ticked=round(NOW - last), **rest)


CRONS = [
    entry("reprice", "every 300", 140, 160, queue="prices", skipped={"paused": 0, "overlap": 3}, is_alive=True),
    entry("nightly-settlement", "0 2 * * * Europe/Berlin", 28_800, 57_600, queue="payments"),
    entry(
        "newsletter",
        "30 8 * * 1-5 Europe/Paris",
        52_000,
        34_000,
        queue="mails",
        pause=Pause("ada@shop", NOW, "we move"),
    ),
    entry("stock-report", "0 * * * * UTC", -1500, 5100, queue="stock", late=1500.0, missed=2, is_served=False),
]
REPORT = StackReport(
    NOW - 2,
    (
        HandlerStack("orders", made_ids(1)[0], ("/srv/shop/orders.py:41 place", "/srv/shop/payments.py:88 charge")),
        HandlerStack(
            "orders",
            made_ids(2)[1],
            ("/srv/shop/orders.py:44 place", "/srv/shop/stock.py:51 reserve", "/usr/lib/ssl.py:1167 read"),
        ),
    ),
)
#: Name of a picture -> template, data of the template, and height of the window.
PICTURES = {
    "queues": ("queues.html", {"overview": Overview(VIEWS, WORKERS, {}, {}, NOW), "histories": HOURS}, 760),
    "queue": (
        "queue.html",
        {
            "view": ORDERS,
            "history": HOURS["orders"],
            "running": RUNNING,
            "failures": [record(reason="failed", raised=CONNECT, count=31, sampled=40)],
        },
        1060,
    ),
    "message": ("message.html", {"message": SHOWN, "show_bodies": True}, 840),
    "periodic": ("crons.html", {"entries": CRONS}, 430),
    "worker": (
        "worker.html",
        {"worker": WorkerView("a", WORKERS[0], None, REPORT), "silent_seconds": 10.0},
        730,
    ),
    "dead": (
        "dead.html",
        {
            "queue": "orders",
            "view": ORDERS,
            "groups": record(groups=GROUPS, looked=106, of=106),
            "reasons": DEATH_REASONS,
            "page": record(items=LETTERS, after="more", looked=None, of=None),
        },
        900,
    ),
}


def url(route: str, **params: Any) -> str:
    """Return the address of a page."""
    return f"/static/{params['path']}" if route == "static" else f"/{route}"


def answer(environment: Environment, route: Route) -> None:
    """Answer a request of the browser for a page or for its style sheet."""
    name = route.request.url.removeprefix(ORIGIN).removeprefix("/").partition("?")[0]
    if name in PICTURES:
        template, fields, _ = PICTURES[name]
        route.fulfill(
            body=environment.get_template(template).render(**context(url=url, may_log_out=False, **fields)),
            content_type="text/html",
        )
    elif name.startswith("static/"):
        route.fulfill(path=TEMPLATES.parent / name)


def save(png: bytes, path: Path) -> None:
    """Write a picture with a palette: it looks the same and needs a fifth of the bytes."""
    image = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)
    sys.stdout.write(f"{path} {path.stat().st_size}\n")


def main() -> None:
    """Make every picture in a light and a dark version."""
    IMAGES.mkdir(exist_ok=True)
    environment = templates()
    with chromium() as browser:
        for scheme in ("light", "dark"):
            window = browser.new_page(color_scheme=scheme)
            window.route("**/*", lambda route: answer(environment, route))
            for name, (_, _, height) in PICTURES.items():
                window.set_viewport_size({"width": 1360, "height": height})
                window.goto(f"{ORIGIN}/{name}")
                save(window.screenshot(), IMAGES / f"web-{name}-{scheme}.png")


if __name__ == "__main__":
    main()
