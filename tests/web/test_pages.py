"""Templates, style and script: nothing inline, nothing unescaped, nothing red at rest, nothing that nobody uses."""

import re
from pathlib import Path

import pytest
from made_up import NOW, context, minute, overview, rates, view, worker

from reliq.message import Pause
from reliq.web.curves import HEIGHT, WIDTH, Curve, ages, share
from reliq.web.marks import is_unwatched, marks
from reliq.web.pages import TEMPLATES, Pages

STATIC = TEMPLATES.parent / "static"
STYLE = (STATIC / "reliq.css").read_text("utf-8")
SCRIPT = (STATIC / "reliq.js").read_text("utf-8")
NAMES = sorted(str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.html"))
#: Classes that a template puts together from a value: its prefix is not written there.
OF_VALUES = {"bad", "warn", "well", "off", "away", "in", "out", "fail", "age", "held", "wrong"}
OF_VALUES |= {"claimed", "failed", "dead", "expired", "acked"}


def text_of(name):
    return (TEMPLATES / name).read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_template_has_no_inline_style_script_or_handler_and_no_unescaped_text(name):
    text = text_of(name)

    inline = r"<style|<script(?! src=)|\sstyle=|\son\w+=|javascript:|\|\s*safe|autoescape|http://|https://"

    assert re.findall(inline, text) == []


def classes_in(text):
    """The class names that stand in a template, words of expressions apart."""
    for value in re.findall(r'class="([^"]*)"', text):
        yield from re.sub(r"\{\{.*?\}\}|\{%.*?%\}", " ", value).split()
    for values in re.findall(r"curves\('([\w ]*)'", text):
        yield from values.split()


def test_every_class_of_the_templates_has_a_style_and_every_style_a_class():
    used = {one for name in NAMES for one in classes_in(text_of(name))} | OF_VALUES
    styled = set(re.findall(r"\.([a-z][\w-]*)", re.sub(r"/\*.*?\*/", "", STYLE, flags=re.DOTALL)))

    assert (styled - used, used - styled) == (set(), set())


def test_a_queue_at_rest_is_not_marked_and_nothing_on_its_page_is_red():
    at_rest = view(rates=rates(acked=3.0), late=0.0)

    html = Pages().render("live/queues.html", **context(overview=overview(at_rest, workers=[worker()]), histories={}))

    hour = [minute(published=3, acked=3)] * 60
    html += Pages().render("live/queue.html", **context(view=at_rest, history=hour, running=[], failures=[]))

    assert marks(at_rest) == []
    assert re.findall(r'class="[^"]*\b(bad|warn|is-bad|fail|wrong)\b', html) == []


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"ready": 3, "workers": 0, "slots": 0}, [("bad", "nobody works on it")]),
        ({"pending": 3, "workers": 0, "slots": 0}, [("bad", "nobody works on it")]),
        ({"workers": 0, "slots": 0}, []),
        ({"ready": 3}, []),
        ({"ready": 3, "workers": 0, "slots": 0, "rates": rates(acked=2.0)}, []),  # `Queue.receive` is no worker
        ({"late": 59.0}, []),
        ({"late": 60.0}, [("warn", "1m late")]),
        ({"late": 300.0}, [("bad", "5m late")]),
        ({"late": None}, []),
        ({"late": 900.0, "pause": Pause("ada", NOW, "we move")}, [("warn", "paused: we move")]),
        ({"pause": Pause("", None, "")}, [("warn", "paused")]),
        ({"rates": rates(acked=91.0, failed=9.0)}, []),
        ({"rates": rates(acked=9.0, failed=1.0)}, [("warn", "10% of deliveries fail")]),
        ({"rates": rates(acked=1.0, failed=1.0)}, [("bad", "50% of deliveries fail")]),
        ({"busy": 15}, []),
        ({"busy": 16}, [("warn", "all slots busy")]),
    ],
)
def test_a_queue_is_marked_for_what_wants_a_look(fields, found):
    assert marks(view(**fields)) == found


def test_a_queue_nobody_works_on_stands_out_in_the_table_and_in_its_picture():
    waits = view("invoices", ready=7, workers=0, slots=0, late=3.0, oldest={"ready": 3.0})

    table = Pages().render("live/queues.html", **context(overview=overview(waits), histories={}))
    page = Pages().render("live/queue.html", **context(view=waits, history=[], running=[], failures=[]))

    assert is_unwatched(waits)
    assert re.search(r'<tr id="queue-reliq-invoices" class="bad">', table)
    assert "Nobody works on this queue" in page
    assert re.search(r'class="wrong" aria-label="ready: 7"', page)


def test_one_worker_is_no_workers_and_two_are():
    html = Pages().render(
        "live/queues.html",
        **context(overview=overview(view("a"), view("b", workers=2), workers=[worker()]), histories={}),
    )

    assert re.findall(r"\d+ workers?\b", html) == ["1 worker", "2 workers", "1 worker"]


def test_the_last_hour_of_a_queue_is_drawn_in_the_table_and_on_its_page():
    hour = [minute(2, 1, 1, 1, 20.0, ago=60 * past) for past in reversed(range(31))]

    table = Pages().render("live/queues.html", **context(overview=overview(view()), histories={"orders": hour}))
    page = Pages().render("live/queue.html", **context(view=view(), history=hour, running=[], failures=[]))

    assert re.findall(r'<polyline class="curve (\w+)" points="120.0', table) == ["out", "in", "age"]
    assert re.findall(r'<polyline class="curve (\w+)" points="120.0', page) == ["out", "in", "fail", "age"]
    assert "at most 20s" in page


def test_the_last_row_sums_up():
    views = view("a", ready=2, dead=1, rates=rates(acked=1.5)), view("b", ready=3, retry=4, rates=rates(acked=2.0))

    html = Pages().render("live/queues.html", **context(overview=overview(*views), histories={}))

    cells = dict(re.findall(r'data-label="([\w/]+)">(?:<span[^>]*>)?([^<]*)', html.partition("<tfoot>")[2]))
    assert (cells["ready"], cells["retry"], cells["dead"], cells["done/s"]) == ("5", "4", "1", "3.5")


EVIL = "<script>alert(1)</script>\u202e\"'"


def test_what_others_wrote_is_escaped_and_characters_that_hide_are_shown():
    paused = view(EVIL, pause=Pause(EVIL, NOW, EVIL), unack=1)

    html = Pages(EVIL).render("queue.html", **context(view=paused, history=[], running=[], failures=[], said=EVIL))

    assert "<script>" not in html
    assert "\u202e" not in html
    assert "\\u202e" in html
    assert html.count("&lt;script&gt;") >= 6


def test_a_lone_surrogate_of_a_foreign_id_is_printed_so_that_it_can_be_sent():
    html = Pages().render("live/queues.html", **context(overview=overview(view("a\udcff")), histories={}))

    assert "a\\udcff" in html
    html.partition("<tbody>")[2].replace("queue=a\udcff", "").encode()


def curve(noted, top=10.0):
    """The curve of numbers, by how many seconds ago they were noted."""
    return Curve([minute(ago=ago) for ago in noted], list(noted.values()), NOW, top)


def test_a_curve_ends_now_and_touches_the_upper_edge_with_its_highest_number():
    drawn = curve({3600: 0.0, 3540: 10.0, 60: 5.0, 0: 0.0})

    first, second = drawn.lines()
    assert first.split() == [f"0.0,{HEIGHT - 1:.1f}", f"{WIDTH / 60:.1f},1.0"]
    assert second.split() == [f"{59 * WIDTH / 60:.1f},{HEIGHT / 2:.1f}", f"{WIDTH:.1f},{HEIGHT - 1:.1f}"]
    assert len(drawn.areas()) == 2


def test_a_curve_whose_workers_died_ends_when_they_did():
    [line] = curve({1920: 1.0, 1860: 1.0, 1800: 1.0}).lines()

    assert line.split()[-1].startswith(f"{WIDTH / 2:.1f},")


@pytest.mark.parametrize("noted", [{}, {0: None}, {7200: 1.0}, {0: 0.0}, {120: None, 60: 3.0}, {-5: 1.0}])
def test_a_curve_of_little_or_nothing_can_be_drawn(noted):
    drawn = curve(noted, top=0.0)

    shown = [number for ago, number in noted.items() if number is not None and ago <= 3600]
    assert len(drawn.lines()) == len(drawn.areas()) == len(shown)


def test_a_minute_in_which_nothing_waited_has_an_age_of_none_but_one_that_nobody_knows_has_a_gap():
    minutes = [minute(), minute(waiting=3, oldest=7.5), minute(waiting=3)]

    assert ages(minutes) == [0.0, 7.5, None]


@pytest.mark.parametrize(("part", "whole", "percent"), [(1, 2, 50.0), (3, 2, 100.0), (0, 0, 0.0), (1, 0, 0.0)])
def test_a_share_is_of_a_hundred(part, whole, percent):
    assert share(part, whole) == percent


def test_every_template_is_a_page_a_part_of_one_or_what_pages_share():
    shared = {name for name in NAMES if name in {"base.html", "macros.html", "live/picture.html"}}
    parts = {name for name in NAMES if name.startswith("live/")} - shared

    included = {
        one for name in NAMES for one in re.findall(r"(?:include|extends|import|from) '([^']+)'", text_of(name))
    }
    assert shared | parts == included
    assert Path(TEMPLATES, "error.html").is_file()
