"""Start and stop a PostgreSQL server in a separate folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.ports import free_port
from tests.waiting import eventually

#: Debian's folder of the programs, which is not on PATH.
DEBIAN = Path("/usr/lib/postgresql")
#: Turn off slow options that only protect against a loss of power.
QUICK = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "32MB"}


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, None if it is not installed."""
    debian = max((one.parent for one in DEBIAN.glob("*/bin/initdb")), default=None)
    found = shutil.which("initdb")
    return debian or (Path(found).resolve().parent if found else None)


class Postgres:
    """A PostgreSQL server, also without pytest. PostgreSQL refuses to run as root: then it runs as `nobody`."""

    def __init__(self, **options: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="reliq-pg-"))
        self._programs, self._options = programs(), {**QUICK, **options}
        self.port = free_port()
        self._process: subprocess.Popen | None = None
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        data = self._folder / "data"
        data.mkdir()
        if self._user:
            for folder in (self._folder, data):
                os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        made = ["--auth=trust", "--username=postgres", "--no-sync", "--encoding=UTF8", "--locale=C"]
        self._run("initdb", "--pgdata", str(data), *made).check_returncode()
        return self.start()

    def start(self) -> Self:
        """Start it, or restart it on the same data; return when it accepts connections."""
        options = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        where = ["-D", str(self._folder / "data"), "-p", str(self.port), "-h", "127.0.0.1", "-k", str(self._folder)]
        log = (self._folder / "log").open("ab")
        command = [str(self._programs / "postgres"), *where, *options]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        log.close()
        eventually(
            lambda: self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)).returncode == 0, "PostgreSQL"
        )
        return self

    def stop(self, how: int = 3) -> None:
        """Stop it by a signal: SIGQUIT (3) is immediate and does not write data from memory."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def __exit__(self, *_error: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [str(self._programs / program), *arguments]
        return subprocess.run(command, capture_output=True, check=False, **self._as_user())

    def _as_user(self) -> dict:
        if self._user is None:
            return {"cwd": self._folder}
        ids = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return {"cwd": self._folder, "env": {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, **ids}
