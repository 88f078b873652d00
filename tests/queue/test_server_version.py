"""The first request of a queue checks the version of the server."""

from contextlib import ExitStack, closing

import pytest
from listener import Listener

from reliq import ConfigurationError


class OldServer(Listener):
    """Speaks enough of Redis' protocol to report an old version; records all other commands."""

    def __init__(self, info):
        self.asked = []
        self._info = info
        super().__init__()

    def _serve(self, peer, _number):
        with peer, peer.makefile("rb") as lines:
            while first := lines.readline():
                words = []
                for _ in range(int(first[1:])):
                    words.append(lines.read(int(lines.readline()[1:])))
                    lines.readline()
                peer.sendall(self._answer(words))

    def _answer(self, words):
        if words[0] == b"INFO":
            return self._info
        if words[0] == b"CLIENT":
            return b"+OK\r\n"
        self.asked.append(words[0])
        return b"$0\r\n\r\n" if words[0] == b"GETRANGE" else b":1\r\n"


@pytest.fixture
def old_server():
    with ExitStack() as stack:
        yield lambda info: stack.enter_context(closing(OldServer(info)))


def told(version):
    text = b"# Server\r\nredis_version:%s\r\n" % version
    return b"$%d\r\n%s\r\n" % (len(text), text)


def test_server_before_6_2_is_refused_before_anything_is_written(old_server, call, make_queue):
    server = old_server(told(b"6.0.16"))
    queue = make_queue(url=server.url)

    for name, args in [("publish", ({},)), ("counts", ()), ("publish", ({},))]:
        with pytest.raises(ConfigurationError, match="^Redis must be 6.2 or newer, not 6.0.16$"):
            call(queue, name, *args)

    assert server.asked == []


def test_server_that_hides_its_version_is_accepted(old_server, make_queue):
    for info in (b"-NOPERM this user has no right\r\n", b"$0\r\n\r\n", told(b"unknown"), told(b"10.0.0")):
        server = old_server(info)
        queue = make_queue(url=server.url)
        assert queue.resume() is True
        assert b"DEL" in server.asked


def test_version_of_a_server_is_read_once(url, commands, client, make_queue):
    queue = make_queue(url=f"{url}?client_name=once")

    for _ in range(10):
        queue.publish({})

    assert client.info("commandstats")["cmdstat_info"]["calls"] <= 3


def test_foreign_reply_leaves_the_outcome_of_a_publish_unknown(old_server, call, make_queue):
    server = old_server(told(b"7.0.0"))
    queue = make_queue(url=server.url)

    with pytest.raises(Exception, match="got an unexpected reply") as caught:
        call(queue, "publish", {})

    assert caught.value.outcome == "unknown"
