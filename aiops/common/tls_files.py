"""The files of one side of TLS, as users name them."""

from __future__ import annotations

from os import PathLike, fspath

from aiops.errors import UsageError

CA, CERT, KEY = "AIOPS_TLS_CA", "AIOPS_TLS_CERT", "AIOPS_TLS_KEY"
"""The variables that clients and servers take these files from where they are not given."""


class Tls:
    """The files with which a client connects to ``aiops+tls://`` servers.

    ::

        tls = aiops.Tls(ca="tls/ca.pem", cert="tls/client.pem", key="tls/client.key")
        with aiops.Worker("aiops+tls://host:7171", params, tls=tls) as worker: ...

    Each that is left out is that of its variable, AIOPS_TLS_CA, AIOPS_TLS_CERT or AIOPS_TLS_KEY.

    Parameters
    ----------
    ca
        The certificates of those who may issue a server's, as a PEM file. Default: those that the
        system trusts.
    cert, key
        This client's certificate, for a server that asks for one, and its private key, as PEM
        files. Without ``key`` it is in the file ``cert``.

    Raises
    ------
    UsageError
        When there is a key without a certificate.
    """

    __slots__ = ("ca", "cert", "key")

    def __init__(
        self,
        ca: str | PathLike[str] | None = None,
        cert: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
    ) -> None:
        self.ca: str | None = None if ca is None else fspath(ca)
        self.cert: str | None = None if cert is None else fspath(cert)
        self.key: str | None = None if key is None else fspath(key)
        if self.key is not None and self.cert is None:
            raise UsageError(f"{self.key} is a key without a certificate: name that, too")

    def __repr__(self) -> str:
        return f"Tls(ca={self.ca!r}, cert={self.cert!r}, key={self.key!r})"
