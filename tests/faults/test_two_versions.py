"""A rolling deploy: the version before the last change and the present one, on one queue, under kill -9."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from waiting import eventually

from reliq.keys import WORKERS_KEY

ROOT = Path(__file__).parents[2]
KILLS = 4


def git(*arguments):
    """What git answers; empty where there is no repository, or the commit is not in a shallow one."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


@pytest.fixture(scope="session")
def previous(tmp_path_factory):
    """The package as it was before its last change, or at the commit RELIQ_PREVIOUS."""
    changed = git("rev-list", "-1", "HEAD", "--", "reliq").decode().strip()
    commit = os.environ.get("RELIQ_PREVIOUS") or (changed and f"{changed}~1")
    archive = git("archive", commit, "reliq") if commit else b""
    if not archive:
        pytest.skip("the previous version is not here: this is no git clone, or one without the commit before")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


@pytest.mark.timeout(400)
def test_two_versions_work_side_by_side_and_the_account_balances(worker, faulty, admin, previous):
    options = ("--queue", "counted", "--processes", "2", "--concurrency", "2", "--log-level", "error")
    versions = [worker(*options), worker(*options, version=previous)]
    publish = "from faulty import COUNTED; COUNTED.publish_many(range(1000), chunk=10)"
    environment = dict(zip(("env", "cwd"), (versions[1].environment, previous), strict=True))
    eventually(lambda: admin.zcard(WORKERS_KEY) >= 4, "every process works")  # so that there is some for each
    with subprocess.Popen([sys.executable, "-c", publish], **environment) as old_publisher:
        confirmed = faulty.COUNTED.publish_many(range(1000), chunk=10).published
        for turn in range(KILLS):
            of = versions[turn % 2]
            eventually(lambda of=of: len(of.children()) == 2, "both processes run")
            goal = admin.hlen("note:done") + 50
            eventually(lambda goal=goal: admin.hlen("note:done") > goal or not alive(faulty), "work is done")
            of.children()[0].kill()
    assert old_publisher.returncode == 0
    eventually(lambda: not alive(faulty), "everything is worked in the end")

    counts = faulty.COUNTED.counts()
    assert (counts.missing, counts.dead, confirmed) == (0, 0, 1000)
    assert counts.totals["published"] == counts.totals["acked"] == admin.hlen("note:done") == 2000
    assert {Path(place.decode()) for place in admin.hkeys("note:by")} == {ROOT, previous}
    assert not any(version.said("Traceback") for version in versions)


def alive(faulty):
    return faulty.COUNTED.counts().alive
