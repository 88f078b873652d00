"""TLS: the server's certificate is verified, and only an explicit option turns this off."""

import ssl
from contextlib import closing

import pytest
import redis

from reliq import ConfigurationError, InsecureWarning, PublishFailed, Queue
from reliq.redis.server import Connection, pool

pytestmark = pytest.mark.usefixtures("patient")

HERE = ("IP:127.0.0.1", "DNS:localhost")


@pytest.fixture(scope="module")
def server(tls_server, authority):
    return tls_server(*authority.vouch_for("here", *HERE))


@pytest.fixture(scope="module")
def server_elsewhere(tls_server, authority):
    """A server with a certificate for another host."""
    return tls_server(*authority.vouch_for("elsewhere", "DNS:redis.example"))


@pytest.fixture
def url(authority):
    """Return the URL of a port with the certificate authority and further options."""
    return lambda port, *options: (
        f"rediss://127.0.0.1:{port}/0?{'&'.join((f'ssl_ca_certs={authority.certificate}', *options))}"
    )


def works(url, call):
    with closing(Queue("q", url=url)) as queue:
        return call(queue, "publish", {}).status == "published"


def refused(url, call):
    with closing(Queue("q", url=url)) as queue, pytest.raises(PublishFailed) as caught:
        call(queue, "publish", {})
    assert caught.value.outcome == "refused"
    return str(caught.value)


@pytest.mark.usefixtures("impatient")
def test_only_a_certificate_of_a_known_authority_for_that_host_is_accepted(server, server_elsewhere, url, call):
    assert works(url(server), call)
    assert works(url(server).replace("127.0.0.1", "localhost"), call)
    assert "certificate verify failed" in refused(url(server).partition("?")[0], call)
    assert "certificate is not valid for '127.0.0.1'" in refused(url(server_elsewhere), call)


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_certificate_checks_are_off_only_with_insecure_true(server_elsewhere, url, call, option):
    with pytest.raises(ConfigurationError, match="would accept any certificate"):
        Queue("q", url=url(server_elsewhere, option))
    assert works(url(server_elsewhere, option, "insecure=true"), call)


def test_redis_py_client_without_certificate_checks_warns(server_elsewhere):
    with redis.Redis(port=server_elsewhere, ssl=True, ssl_cert_reqs="none") as theirs:
        with pytest.warns(InsecureWarning, match="accepts any certificate"):
            Queue("q", url=theirs).publish({})
        Queue("q", url=theirs).close()


@pytest.mark.usefixtures("impatient")
def test_client_certificate_is_sent_to_a_server_that_requires_it(tls_server, authority, url, call):
    key, certificate = authority.vouch_for("worker", *HERE)
    port = tls_server(*authority.vouch_for("strict", *HERE), tls_auth_clients="yes")

    refused(url(port), call)
    assert works(url(port, f"ssl_certfile={certificate}", f"ssl_keyfile={key}"), call)


@pytest.mark.usefixtures("impatient")
def test_oldest_tls_version_may_be_raised(tls_server, authority, url, call):
    port = tls_server(*authority.vouch_for("older", *HERE), tls_protocols="TLSv1.2")

    assert works(url(port), call)
    refused(url(port, "ssl_min_version=1.3"), call)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asyncio"])
def test_tls_is_1_2_at_least(asynchronous):
    older = redis.Redis(ssl=True, ssl_min_version=ssl.TLSVersion.MINIMUM_SUPPORTED)
    for target in ("rediss://h/0", "rediss+sentinel://h/shop", redis.Redis(ssl=True), older):
        made = pool(target, 1.0, asynchronous=asynchronous)
        settings = made.connection_kwargs

        assert settings["ssl_min_version"] == ssl.TLSVersion.TLSv1_2, target


def test_connections_to_sentinels_use_tls():
    made = pool("rediss+sentinel://:p@h:1/shop?ssl_ca_certs=/a&sentinel_password=s", 1.0, asynchronous=False)
    (sentinel,) = made.sentinel_manager.sentinels

    assert issubclass(sentinel.connection_pool.connection_class, redis.SSLConnection)
    settings = sentinel.connection_pool.connection_kwargs
    assert (settings["password"], settings["ssl_ca_certs"]) == ("s", "/a")
    assert settings["ssl_min_version"] == ssl.TLSVersion.TLSv1_2
    assert made.connection_kwargs["password"] == "p"


@pytest.mark.parametrize(
    "target",
    [
        "redis://:s3cret@shop.example/0",
        "redis+sentinel://:s3cret@shop.example/shop",
        redis.Redis(host="shop.example", password="s3cret"),
    ],
    ids=["url", "sentinel", "client"],
)
def test_password_sent_in_the_clear_warns_once(target):
    with pytest.warns(InsecureWarning, match="crosses the network unencrypted") as warned:
        Connection.to(target)
    Connection.to(target)

    assert len(warned) == 1
    assert "s3cret" not in str(warned[0].message)
