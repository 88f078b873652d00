"""Each option has one home: where its default and its type stand, what type checkers read says the same."""

import dataclasses
import typing

import pytest

from reliq import Outgoing, Queue
from reliq.declared import LimitOptions
from reliq.limits import Limits
from reliq.outgoing import PublishOptions
from reliq.settings import QueueSettings, SettingsOptions


def fields(kind):
    return {field.name: str(field.type).replace("'", "") for field in dataclasses.fields(kind)}


def keys(kind):
    """The keys of a TypedDict with their types as they are written."""
    return {name: getattr(hint, "__forward_arg__", None) or str(hint) for name, hint in kind.__annotations__.items()}


def test_the_options_of_a_publish_are_those_of_an_outgoing_message():
    assert keys(PublishOptions) == {name: kind for name, kind in fields(Outgoing).items() if name != "body"}


def test_the_settings_that_a_queue_takes_are_those_that_it_has():
    assert typing.get_type_hints(SettingsOptions) == typing.get_type_hints(QueueSettings)


def test_the_limits_that_a_queue_takes_are_those_that_there_are():
    assert keys(LimitOptions) == fields(Limits)


@pytest.mark.parametrize(
    ("method", "options"), [(Queue.publish, PublishOptions), (Queue, SettingsOptions), (Queue, LimitOptions)]
)
def test_every_option_is_told_where_a_reader_looks(method, options):
    told = method.__doc__ or ""

    assert [name for name in keys(options) if name not in told] == []


@pytest.mark.parametrize("make", [lambda: Queue("q", retry=1), lambda: Queue("q").publish({}, delya=1)])
def test_an_option_that_is_none_is_refused_by_its_name(make):
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(retry|delya)'"):
        make()
