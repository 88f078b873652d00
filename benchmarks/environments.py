"""An environment for each peer, made when it is first needed and kept outside git."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.catalogue import Peer

ROOT = Path(__file__).parents[1]
WORK = Path(__file__).parent / ".work"
INSTALL_SECONDS = 300.0
#: Holds what was installed: a change of the requirements makes the environment anew.
STAMP = "installed.txt"


class InstallError(Exception):
    """A peer could not be installed; the text is the installer's last line."""


def command(peer: Peer, *step: str) -> list[str]:
    """Return the command line that does a step of a peer, with its environment made if need be."""
    if not peer.requirements:
        return [sys.executable, "-m", "benchmarks.peers", peer.module, *step]
    folder = WORK / "environments" / peer.module.replace(".", "_")
    _make(peer, folder)
    if peer.is_node:
        return ["node", str(ROOT / "benchmarks" / "peers" / peer.module), *step]
    return [str(folder / "bin" / "python"), "-m", "benchmarks.peers", peer.module, *step]


def folder_of(peer: Peer) -> Path:
    """Return where a peer's processes run: Node finds its packages by that."""
    return WORK / "environments" / peer.module.replace(".", "_") if peer.is_node else ROOT


def _make(peer: Peer, folder: Path) -> None:
    wanted = "\n".join(peer.requirements)
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if peer.is_node:
        _run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *peer.requirements)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, *peer.requirements)
    stamp.write_text(wanted)


def _run(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise InstallError(f"{words[0]} is not on this machine")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"installing took longer than {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise InstallError(lines[-1] if lines else f"{words[0]} ended with {done.returncode}")
