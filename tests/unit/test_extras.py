"""What is missing is told without naming a package of an index that may be somebody else's."""

import re
import sysconfig
from pathlib import Path

import pytest

import reliq
from reliq.embedded import bundled_server
from reliq.errors import ConfigurationError


def test_no_message_says_to_install_reliq_from_an_index():
    texts = [path.read_text("utf-8") for path in Path(reliq.__file__).parent.rglob("*.py")]

    assert [text for text in texts if re.search(r"pip install ['\"]?reliq", text)] == []


def test_a_missing_server_is_told_with_what_brings_one(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match="or reliq with its extra 'embedded' from where you have reliq"):
        bundled_server()


@pytest.mark.parametrize("name", ["redis-server", "redis-cli"])
def test_the_extra_embedded_brings_a_server_and_its_client_into_the_environment(name):
    assert (Path(sysconfig.get_path("scripts")) / name).exists()
