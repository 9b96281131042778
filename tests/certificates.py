"""Certificates for tests, of authorities that trust each other or do not."""

from __future__ import annotations

import datetime
import functools
import tempfile
from pathlib import Path

import trustme

import aiops


class Authority:
    """A CA with a folder, which has a server's and a client's certificate."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="aiops-tls-"))
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca = self.folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)
        self.server = self.issue("server", "localhost", "127.0.0.1", "::1")
        self.client = self.issue("client", "worker.test")

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Path:
        """Write a certificate with its key and chain; return the file."""
        past = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)
        times = {"not_before": past, "not_after": past} if expired else {}
        made = self._ca.issue_cert(*hosts, key_type=trustme.KeyType.ECDSA, **times)
        path = self.folder / f"{name}.pem"
        path.write_bytes(made.private_key_and_cert_chain_pem.bytes())
        return path

    def settings(self, *, mutual: bool = True) -> dict[str, Path]:
        """Return a server's settings."""
        found = {"tls_cert": self.server}
        return {**found, "tls_ca": self.ca} if mutual else found

    @property
    def tls(self) -> aiops.Tls:
        """What a client of this CA connects with."""
        return aiops.Tls(ca=self.ca, cert=self.client)

    @property
    def anonymous(self) -> aiops.Tls:
        """What a client without a certificate connects with."""
        return aiops.Tls(ca=self.ca)


@functools.cache
def ours() -> Authority:
    """The CA of a test's servers and clients."""
    return Authority()


@functools.cache
def foreign() -> Authority:
    """One that they do not know."""
    return Authority()
