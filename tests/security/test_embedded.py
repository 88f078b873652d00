"""The private Redis is private."""

import os
import stat

from reliq.embedded import EmbeddedRedis


def test_its_socket_is_its_owners_alone_however_open_new_files_are_and_wherever_it_lies(tmp_path, server_path):
    before = os.umask(0)
    try:
        with EmbeddedRedis(server=server_path, folder=tmp_path) as server:
            assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    finally:
        os.umask(before)
