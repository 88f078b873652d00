"""Bulk actions in the background: progress, result, and stopping them."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from waiting import eventually

from reliq import Layout, Queue
from reliq.admin import messages
from reliq.web import pages
from reliq.web.actions import REMEMBERED, RUNNING_LIMIT, BackgroundTask, BackgroundTasks


@pytest.fixture
def letters(url, fail):
    """Thirty dead letters, ten of them with another error."""
    queue = Queue("orders", str, url=url, retries=0)
    queue.publish_many(["x"] * 20)
    fail(queue, ValueError("canary"), dead=20)
    queue.publish_many(["x"] * 10)
    fail(queue, KeyError("canary"), dead=30)
    return queue


def ended(site, answer):
    """Return the task that a form started, when it has ended."""
    task = site.app.tasks.get(answer.headers["location"].rpartition("/")[2])
    eventually(lambda: task.state != "running", "the task ends")
    return task


def test_dead_letters_of_one_place_are_redriven(letters, admin, site):
    place = admin.dead_groups("orders").groups[0].raised
    task = ended(site, site.browser().post("/queues/orders/redrive", data={"raised": place, "delay": "1h"}))

    assert (task.state, task.done, task.total, task.by, task.outcome) == ("finished", 30, 30, "alice", "20 redriven")
    assert (admin.count("orders", "pending"), admin.count("orders", "dead")) == (20, 10)
    page = site.browser().get(f"/progress/{task.id}")
    assert "20 redriven" in page.text
    assert "data-live" not in page.text


def test_slow_redrive_shows_its_progress_and_two_visitors_stop_it_between_steps(letters, admin, site):
    browser, other = site.browser(), site.browser()
    location = browser.post("/queues/orders/redrive", data={"rate": "0.01", "delay": "1h"}).headers["location"]
    id = location.rpartition("/")[2]

    running = browser.get(location).text
    eventually(lambda: admin.count("orders", "pending"), "a letter is redriven")
    stopped = [visitor.post(f"{location}/stop").status_code for visitor in (browser, other)]
    eventually(lambda: 'data-live="task"' not in browser.get(location).text, "it has stopped")
    task = site.app.tasks.get(id)

    assert 'data-live="task"' in running
    assert ">stopped<" in browser.get(location).text
    assert (stopped, task.state) == ([303, 303], "stopped")
    assert 0 < admin.count("orders", "pending") < 30
    assert task.outcome == f"{admin.count('orders', 'pending')} redriven"
    assert admin.account("orders").missing == 0


def test_page_groups_the_newest_dead_letters_and_more_when_asked(letters, site, monkeypatch):
    monkeypatch.setattr(pages, "GROUPS_SECONDS", 0)
    monkeypatch.setattr(messages, "FIRST_STEP", 10)
    program = site.program()

    some = program.get("/queues/orders/dead").text
    further = program.get(re.search(r'href="([^"]*further=1)"', some)[1]).text

    assert "Looked at 10 of 30" in some
    assert "Looked at 30 of 30" in further
    assert "Look further" not in further


def test_dead_letters_and_messages_are_deleted(letters, admin, site):
    letters.publish_many(["y"] * 5)
    browser = site.browser()
    gone = ended(site, browser.post("/queues/orders/purge", data={"state": "dead", "raised": "-"}))
    dead = ended(site, browser.post("/queues/orders/purge", data={"state": "dead"}))
    ready = ended(site, browser.post("/queues/orders/purge", data={"state": "ready"}))

    assert [task.outcome for task in (gone, dead, ready)] == ["0 deleted", "30 deleted", "5 deleted"]
    assert admin.account("orders").missing == 0


def test_check_reports_what_is_wrong(orders, client, admin, site):
    sound = ended(site, site.browser().post("/queues/orders/check"))
    client.zadd(admin.redis_keys("orders").pending, {"x": 1})
    wrong = ended(site, site.browser().post("/queues/orders/check"))

    assert sound.outcome == "the queue is sound; 1 id looked at"
    assert "NOT sound" in wrong.outcome
    assert "1 twice" in wrong.outcome


def test_progress_page_leads_back_to_a_queue_of_the_go_layout(url, site):
    Queue("orders", bytes, url=url, layout=Layout.hdt3213()).publish(b"x")
    task = ended(site, site.browser().post("/queues/orders/check?layout=hdt3213"))
    page = site.program().get(f"/progress/{task.id}").text

    assert 'href="/queues/orders?layout=hdt3213"' in page


def task_of(name):
    return BackgroundTask("a title", "orders", "", "alice", "alice@there", False, None, id=name)


def test_failed_task_is_reported_and_its_error_is_in_the_log_alone(caplog):
    tasks, task = BackgroundTasks(), task_of("w")

    def run():
        task.step(3, "3 redriven")
        raise RuntimeError("a secret")

    assert tasks.start(task, run)
    eventually(lambda: task.state != "running", "the task ends")

    assert (task.state, task.done) == ("failed", 3)
    assert "secret" not in task.outcome
    assert "a secret" in caplog.text


def test_tasks_at_once_and_tasks_remembered_are_limited():
    tasks, go_on = BackgroundTasks(), threading.Event()
    run = go_on.wait
    started = [tasks.start(task_of(str(number)), run) for number in range(RUNNING_LIMIT + 1)]
    check = tasks.start(BackgroundTask("a title", "orders", "", "bob", "bob@there", True, None), run)
    go_on.set()
    eventually(lambda: all(task.state == "finished" for task in tasks.values()), "they end")

    assert started == [True] * RUNNING_LIMIT + [False]
    assert check is True
    for number in range(REMEMBERED):
        assert tasks.start(task_of(f"later {number}"), lambda: "done")
        eventually(lambda number=number: tasks.get(f"later {number}").state == "finished", "it ends")
    assert list(tasks) == [f"later {number}" for number in range(REMEMBERED)]


class Meeting(int):
    """A limit that makes two threads compare it at the same time: each comparison waits for a second thread."""

    barrier = threading.Barrier(2)

    def __le__(self, count):
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(0.2)
        return int(self) <= count


def test_tasks_begun_at_once_keep_to_the_limit(monkeypatch):
    monkeypatch.setattr("reliq.web.actions.RUNNING_LIMIT", Meeting(1))
    tasks, go_on = BackgroundTasks(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        begun = list(pool.map(lambda name: tasks.start(task_of(name), go_on.wait), "ab"))
    go_on.set()

    assert sorted(begun) == [False, True]


def test_task_whose_thread_does_not_start_takes_no_place(monkeypatch):
    def fail(_thread):
        raise RuntimeError("can't start new thread")

    tasks = BackgroundTasks()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        tasks.start(task_of("w"), lambda: "done")

    assert tasks == {}
