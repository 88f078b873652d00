"""The limit: reliq's own scripts, and a SET, driven by one client with nothing around them."""

from benchmarks.peers import kit
from reliq.bench import Scale, bare
from reliq.bench.stage import Stage


def one(count):
    return count / bare.sets(_stage(singles=count))


def bulk(count):
    return count / bare.publishes(_stage(many=count))


def drain(count):
    return count / bare.drains(_stage(many=count))


def _stage(**numbers):
    return Stage(kit.URL, "bare", Scale(**numbers), lifeline=-1)
