"""What a worker process writes for its supervisor is what it runs, whenever it is looked at."""

import os
import threading

import pytest
from waiting import eventually

from reliq import Consumer, Queue
from reliq.events import Started
from reliq.process.board import Board, BoardView
from reliq.process.child import LOOK_CLOSER_SECONDS, Silence


@pytest.fixture
def sides(tmp_path):
    """A board of one handler, which nothing has claimed for yet, and its supervisor's view."""
    consumer, path = Consumer(), tmp_path / "board"
    consumer.handler(Queue("q", str))(lambda body: None)
    view = BoardView(path, ["q"], 1)
    return Board(path, consumer, consumer.handlers, 1), view


class Followed(str):
    """An id; when it is looked up, the thread that ran its message begins the next one."""

    __slots__ = ("follow",)

    def __hash__(self):
        self.follow()
        return super().__hash__()


def test_what_has_ended_is_cleared(sides):
    board, view = sides
    board(Started("q", "ended", 1, None))

    board.look()

    assert view.rows() == []


def test_what_begins_during_a_look_stays_on_the_board(sides):
    board, view = sides
    ended = Followed("ended")
    ended.follow = lambda: board(Started("q", "begun", 1, None))
    board(Started("q", ended, 1, None))

    board.look()

    assert [row.id for row in view.rows()] == ["begun"]


def test_a_handler_that_begins_is_a_sign_of_life(sides):
    """Threads are compared from then on: what began after the first of two looks at them is not passed over."""
    board, view = sides
    board.look()
    silence, before = Silence(), view.beat
    silence.hear(before, before, os.getpid())
    silence.hear(before, before + LOOK_CLOSER_SECONDS + 0.1, os.getpid())  # the thread that looks has to wait
    assert silence._before

    board(Started("q", "begins", 1, None))
    silence.hear(view.beat, before + LOOK_CLOSER_SECONDS + 0.2, os.getpid())

    assert (silence.seconds, silence.since) == (0.0, view.rows()[0].started_at)
    assert not silence._before


def test_a_look_that_fails_is_made_again(sides, caplog, monkeypatch):
    board, view = sides
    fails = iter([MemoryError(), None])

    def running():
        if error := next(fails, None):
            raise error
        return []

    monkeypatch.setattr(board._consumer, "running", running)

    threading.Thread(target=board.keep_up, daemon=True).start()

    eventually(lambda: view.beat > 0, "it looks again")
    assert "could not be brought up to date" in caplog.text
