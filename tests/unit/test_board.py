"""What a worker process writes for its supervisor is what it runs, whenever it is looked at."""

import pytest

from reliq import Consumer, Queue
from reliq.events import Started
from reliq.process.board import Board, BoardView


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
