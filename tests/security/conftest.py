"""Fixtures of the security tests: a certificate authority, and servers with TLS."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from ports import free_port
from required import must_run_in_ci

from reliq.testing.server import EmbeddedRedis

DEBIAN = Path("/usr/bin/redis-server")


class Authority:
    """A certificate authority with its own root certificate, which signs certificates for names."""

    def __init__(self, folder):
        self._folder = folder
        self.key, self.certificate = folder / "authority.key", folder / "authority.pem"
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=Authority"),
            *("-keyout", self.key, "-out", self.certificate),
        )

    def vouch_for(self, name, *places):
        """Return the key and the certificate of `name` for `places`, such as `IP:127.0.0.1`."""
        key, certificate = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        extension = self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName={','.join(places)}\n")
        request = self._folder / f"{name}.csr"
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        _openssl(
            *("x509", "-req", "-days", "2", "-in", request, "-extfile", extension, "-out", certificate),
            *("-CA", self.certificate, "-CAkey", self.key, "-CAcreateserial"),
        )
        return key, certificate


def _openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls_server(authority):
    """Start servers with TLS only, by Debian's redis-server: the embedded server has no TLS."""
    linked = subprocess.run(["ldd", str(DEBIAN)], capture_output=True, check=False).stdout if DEBIAN.exists() else b""
    if b"libssl" not in linked:
        must_run_in_ci("there is no redis-server that is built with TLS (Debian: apt-get install redis-server)")
    with ExitStack() as stack:

        def start(key, certificate, **options):
            port = free_port()
            names = {"tls_auth_clients": "no", "tls_port": port, "tls_key_file": key, "tls_cert_file": certificate}
            names |= {"tls_ca_cert_file": authority.certificate, **options}
            written = {name.replace("_", "-"): str(value) for name, value in names.items()}
            stack.enter_context(EmbeddedRedis(server=DEBIAN, options=written))
            return port

        yield start
