"""Options have the same types for type checkers and at run time, and a misspelled option is rejected."""

import dataclasses
import typing

import pytest

from reliq import Consumer, OutgoingMessage, Queue, WorkerSettings
from reliq.message import PublishOptions
from reliq.settings import LimitOptions, Limits, QueueSettings, SettingsOptions
from reliq.testing import Reliq


def fields(kind):
    return {field.name: str(field.type).replace("'", "") for field in dataclasses.fields(kind)}


def keys(kind):
    """Return the keys of a TypedDict with their types as written."""
    return {name: getattr(hint, "__forward_arg__", None) or str(hint) for name, hint in kind.__annotations__.items()}


def test_option_types_for_checkers_are_those_of_the_values():
    assert keys(PublishOptions) == {name: kind for name, kind in fields(OutgoingMessage).items() if name != "body"}
    assert typing.get_type_hints(SettingsOptions) == typing.get_type_hints(QueueSettings)
    assert keys(LimitOptions) == fields(Limits)


def test_options_are_documented_where_they_are_passed():
    homes = [(Queue.publish, PublishOptions), (Queue, SettingsOptions), (Queue, LimitOptions)]

    assert [name for home, options in homes for name in keys(options) if name not in home.__doc__] == []


def test_mistyped_option_is_refused_with_the_call_and_the_nearest_name():
    calls = [
        (lambda: Queue("q", retry=1), "Queue() … 'retry'. Did you mean 'retries'?"),
        (lambda: OutgoingMessage(body=1, dealy=3), "OutgoingMessage() … 'dealy'. Did you mean 'delay'?"),
        (lambda: WorkerSettings(graze=3), "WorkerSettings() … 'graze'. Did you mean 'grace'?"),
        (lambda: Queue("q").publish({}, dealy=3), "Queue.publish() … 'dealy'. Did you mean 'delay'?"),
        (
            lambda: Queue("q").publish_many([], delay=3),
            "Queue.publish_many() … 'delay'. It is for each message: OutgoingMessage(body=…, delay=…)",
        ),
        (lambda: Consumer().handler("q", leese=3), "Consumer.handler() … 'leese'. Did you mean 'lease'?"),
        (
            lambda: Consumer().cron("* * * * *", queue=Queue("q"), start=3),
            "Consumer.cron() … 'start'. It takes body, catch_up, jitter, misfire_grace_time, name, overlap, queue, tz",
        ),
        (lambda: Reliq.perform(None, None, None, 1, atempt=2), "Reliq.perform() … 'atempt'. Did you mean 'attempt'?"),
    ]
    for make, said in calls:
        with pytest.raises(TypeError) as refused:
            make()
        assert str(refused.value) == said.replace("…", "got an unexpected keyword argument", 1)
