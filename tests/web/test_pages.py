"""Templates: no inline code, all text escaped, no red on idle pages, and marks for problems."""

import re

from made_up import NOW, context, minute, overview, rates, view, worker

from reliq.message import Pause
from reliq.web.render import HEIGHT, TEMPLATES, WIDTH, ages, curve, marks, share, templates


def render(template, title="reliq", **values):
    return templates(title).get_template(template).render(values)


def test_templates_have_no_inline_style_script_or_unescaped_text():
    inline = r"<style|<script(?! src=)|\sstyle=|\son\w+=|javascript:|\|\s*safe|autoescape|http://|https://"

    found = {path: re.findall(inline, path.read_text()) for path in TEMPLATES.rglob("*.html")}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_queue_at_rest_has_no_mark_and_nothing_red():
    at_rest, hour = view(rates=rates(acked=3.0)), [minute(published=3, acked=3)] * 60
    html = render("queues.html", **context(overview=overview(at_rest, workers=[worker()]), histories={}))
    html += render("queue.html", **context(view=at_rest, history=hour, running=[], failures=[]))

    assert marks(at_rest) == []
    assert re.findall(r'class="[^"]*\b(bad|warn|is-bad|fail|wrong)\b', html) == []


#: State of a queue -> its marks.
MARKED = [
    ({"ready": 3, "workers": 0, "slots": 0}, [("bad", "no worker")]),
    ({"pending": 3, "workers": 0, "slots": 0}, [("bad", "no worker")]),
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
]


def test_queue_is_marked_when_it_needs_attention():
    assert [(fields, marks(view(**fields))) for fields, _ in MARKED] == MARKED


def test_last_hour_of_a_queue_is_drawn_in_the_table_and_on_its_page():
    hour = [minute(2, 1, 1, 1, 20.0, ago=60 * past) for past in reversed(range(31))]

    table = render("queues.html", **context(overview=overview(view()), histories={"orders": hour}))
    page = render("queue.html", **context(view=view(), history=hour, running=[], failures=[]))

    assert re.findall(r'<polyline class="curve (\w+)" points="120.0', table) == ["out", "in", "age"]
    assert re.findall(r'<polyline class="curve (\w+)" points="120.0', page) == ["out", "in", "fail", "age"]
    assert "at most 20s" in page
    assert re.findall(r'<polygon class="area" points="120.0,60 ([^ ]*) .* 240.0,60"', page) == ["120.0,30.0"]


EVIL = "<script>alert(1)</script>\u202e\"'"


def test_foreign_text_is_escaped_and_invisible_characters_are_shown():
    paused = view(EVIL, pause=Pause(EVIL, NOW, EVIL), unack=1)

    html = render("queue.html", EVIL, **context(view=paused, history=[], running=[], failures=[], notice=EVIL))

    assert "<script>" not in html
    assert "\u202e" not in html
    assert "\\u202e" in html
    assert html.count("&lt;script&gt;") >= 6


def drawn(noted, top=10.0):
    """Return the curve of numbers; their keys are ages in seconds."""
    return curve([minute(ago=ago) for ago in noted], list(noted.values()), NOW, top)


def test_curve_ends_with_its_last_minute_and_touches_the_edge_at_its_top():
    first, second = drawn({3600: 0.0, 3540: 10.0, 60: 5.0, 0: 0.0})
    [died] = drawn({1920: 1.0, 1860: 1.0, 1800: 1.0})

    assert first.split() == [f"0.0,{HEIGHT - 1:.1f}", f"{WIDTH / 60:.1f},1.0"]
    assert second.split() == [f"{59 * WIDTH / 60:.1f},{HEIGHT / 2:.1f}", f"{WIDTH:.1f},{HEIGHT - 1:.1f}"]
    assert died.split()[-1].startswith(f"{WIDTH / 2:.1f},")


def test_curve_of_little_or_nothing_can_be_drawn():
    for noted in ({}, {0: None}, {7200: 1.0}, {0: 0.0}, {120: None, 60: 3.0}, {-5: 1.0}):
        shown = [number for ago, number in noted.items() if number is not None and ago <= 3600]
        assert len(drawn(noted, top=0.0)) == len(shown), noted
    assert ages([minute(), minute(waiting=3, oldest=7.5), minute(waiting=3)]) == [0.0, 7.5, None]
    assert [share(1, 2), share(3, 2), share(0, 0), share(1, 0)] == [50.0, 100.0, 0.0, 0.0]
