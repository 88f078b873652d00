"""The embedded Redis is private, and starts with any folder for temporary files."""

import os
import stat
import tempfile

import redis

from reliq.testing.server import EmbeddedRedis


def test_embedded_socket_belongs_to_its_owner_alone(tmp_path, server_path):
    before = os.umask(0)
    try:
        with EmbeddedRedis(server=server_path, folder=tmp_path) as server:
            assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_server_starts_where_the_temporary_folder_is_too_long_for_a_socket(server_path, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    with EmbeddedRedis(server=server_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()

    assert not server.folder.exists()
    assert list(deep.iterdir()) == []
