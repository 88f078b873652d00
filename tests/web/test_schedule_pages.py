"""The page of a queue's schedules that were made at run time: find, pause, resume, delete."""

import pytest


@pytest.fixture
def schedules(orders):
    for number in range(3):
        orders.schedule(f"tenant-{number}", cron="0 6 * * *", body={"id": number})
    return orders


def test_schedules_are_shown_and_found_by_the_start_of_their_names(schedules, site, monkeypatch):
    page = site.program().get("/queues/orders/schedules").text
    found = site.program().get("/queues/orders/schedules?name=tenant-1").text
    monkeypatch.setattr("reliq.web.pages.SCHEDULES_LIMIT", 2)
    cut = site.program().get("/queues/orders/schedules").text

    assert all(f"tenant-{number}" in page for number in range(3))
    assert "0 6 * * * UTC" in page
    assert ("tenant-1</th>" in found, "tenant-2</th>" in found) == (True, False)
    assert ("There are more" in page, "There are more" in cut) == (False, True)
    assert 'href="/queues/orders/schedules"' in site.program().get("/queues/orders").text


def test_schedule_is_paused_resumed_and_deleted(schedules, lookers, site):
    path, browser = "/queues/orders", site.browser()
    assert lookers.browser().post(f"{path}/pause_schedule", data={"name": "tenant-1"}).status_code == 403

    paused = browser.post(f"{path}/pause_schedule", data={"name": "tenant-1", "reason": "<b>we move</b>"})
    assert paused.headers["location"] == f"{path}/schedules?name=tenant-1&done=pause_schedule"
    page = browser.get(paused.headers["location"]).text
    assert ("Paused: its ticks are skipped." in page, "&lt;b&gt;we move&lt;/b&gt;" in page) == (True, True)
    browser.post(f"{path}/resume_schedule", data={"name": "tenant-1"})
    assert [one.pause for one in schedules.schedules()] == [None] * 3

    browser.post(f"{path}/delete_schedule", data={"name": "tenant-1"})
    assert [one.name for one in schedules.schedules()] == ["tenant-0", "tenant-2"]
    assert browser.post(f"{path}/delete_schedule", data={"name": "tenant-1"}).status_code == 400
