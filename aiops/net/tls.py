"""TLS 1.3 for both sides: contexts, and errors that say what to do.

TLS is a matter of transports. The wire and the sessions carry the same bytes with it as without,
and only what dials or accepts a connection knows of it. Nothing older than TLS 1.3 is spoken, a
client always verifies the server's certificate and name, and sessions are not resumed: each
connection shows its certificates again.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiops.common.tls_files import CA, CERT, KEY, Tls
from aiops.errors import ConnectionLost, Untrusted, UsageError

CLOSE_PATIENCE = 1.0
"""Seconds that the other side may take to confirm the end of a connection."""

FIRST_BYTE = 0x16
"""The first byte of a client that speaks TLS; one that speaks the plain wire begins with 0xce."""


@dataclass(frozen=True, slots=True)
class TlsTarget:
    """A server to be reached by TLS.

    Attributes
    ----------
    context
        Verifies its certificate, and has this side's.
    host
        The name, or the IP address, that its certificate must be for.
    """

    context: ssl.SSLContext
    host: str


class TlsClient:
    """Connects one process to servers by TLS.

    Parameters
    ----------
    files
        The certificates; see `Tls`.

    Raises
    ------
    UsageError
        When a file cannot be read, or is not what it should be.
    """

    def __init__(self, files: Tls) -> None:
        self._context = context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _strict(context)
        context.hostname_checks_common_name = False  # workers' certificates have one, and no host
        if files.ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        else:
            _load_ca(context, files.ca, CA)
        if files.cert is not None:
            _load_chain(context, files.cert, files.key, CERT, KEY)

    def target(self, host: str) -> TlsTarget:
        """Return how to connect to the server at this host."""
        return TlsTarget(self._context, host)


class TlsPeers:
    """Connects workers to each other by TLS: each verifies the other's certificate by the same CA.

    Which worker it is the certificate does not say: that they show by the secret of their round.

    Parameters
    ----------
    files
        The certificates; see `Tls`. This side's is shown in both roles.

    Attributes
    ----------
    dialling, accepting
        The contexts of the side that begins the handshake, and of the one that answers it.

    Raises
    ------
    UsageError
        When there is no CA or no certificate, or one of them is not what it should be.
    """

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext

    def __init__(self, files: Tls) -> None:
        if files.ca is None or files.cert is None:
            raise UsageError(
                "workers that average send their models to each other, and verify each other by"
                f" certificates of one CA: set {CA}, {CERT} and {KEY} (`aiops tls client` makes"
                " them)"
            )
        self.dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.dialling.check_hostname = False
        self.accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.accepting.verify_mode = ssl.CERT_REQUIRED
        self.accepting.num_tickets = 0
        for context in (self.dialling, self.accepting):
            _strict(context)
            _load_ca(context, files.ca, CA)
            _load_chain(context, files.cert, files.key, CERT, KEY)


class TlsServer:
    """The certificates of a server, which may be read again while it serves.

    Parameters
    ----------
    cert, key
        Its certificate and private key, PEM files; without ``key`` that is in ``cert``.
    ca
        The certificates of those who may issue a client's. None: clients are not asked for any.

    Attributes
    ----------
    context
        That of the connections accepted from here on.

    Raises
    ------
    UsageError
        When a file cannot be read, or is not what it should be.
    """

    context: ssl.SSLContext

    def __init__(self, cert: Path, key: Path | None, ca: Path | None) -> None:
        self._files = cert, key, ca
        self.context = self._made()
        self._towards_servers = self._client()

    def reload(self) -> None:
        """Read the files again, for the connections made from here on.

        Raises
        ------
        UsageError
            When one cannot be used; then all stay as they are.
        """
        self.context, self._towards_servers = self._made(), self._client()

    def target(self, host: str) -> TlsTarget:
        """Return how to connect to another server of the same run, at this host.

        Raises
        ------
        UsageError
            When there is no CA to verify it by.
        """
        if self._towards_servers is None:
            raise UsageError("TLS between servers needs --tls-ca: each verifies the other by it")
        return self._towards_servers.target(host)

    def _made(self) -> ssl.SSLContext:
        cert, key, ca = self._files
        context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        _strict(context)
        context.sslobject_class = _ServerObject
        context.num_tickets = 0
        _load_chain(
            context, str(cert), None if key is None else str(key), "--tls-cert", "--tls-key"
        )
        if ca is not None:
            _load_ca(context, str(ca), "--tls-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _client(self) -> TlsClient | None:
        cert, key, ca = self._files
        return None if ca is None else TlsClient(Tls(ca, cert, key))


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET


class _ServerContext(ssl.SSLContext):
    """A context whose connections keep what they would have sent when a handshake failed.

    Event loops do not send the alert of a failed handshake, without which a client cannot tell why
    it was left.
    """

    def wrap_bio(self, incoming: Any, outgoing: Any, *args: Any, **options: Any) -> Any:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        made.outgoing = outgoing  # type: ignore[attr-defined]
        return made


class _ServerObject(ssl.SSLObject):
    """The server's side of one connection."""

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        """Go on with the handshake; an error that ends it has the alert with it."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.alert = self.outgoing.read()  # type: ignore[attr-defined]
            raise


def alert_of(error: Exception) -> bytes:
    """Return the alert that the other side is to be sent for a handshake that failed."""
    found: bytes = getattr(error, "alert", b"")
    return found


def _load_ca(context: ssl.SSLContext, path: str, setting: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise UsageError(
            f"{setting} {path}: no certificates in PEM ({error.reason})", damaged=path
        ) from None
    except OSError as error:
        raise UsageError(f"{setting} {path}: {error.strerror or error}") from None


def _load_chain(
    context: ssl.SSLContext, cert: str, key: str | None, cert_setting: str, key_setting: str
) -> None:
    def no_passphrase() -> str:
        raise UsageError(
            f"{key_setting} {key or cert} is encrypted, and a server is started without a person to"
            " type the passphrase: write the key without one, in a file that only you can read"
        )

    for setting, path in ((cert_setting, cert), (key_setting, key)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{setting} {path}: {error.strerror or error}") from None
    try:
        context.load_cert_chain(cert, key, no_passphrase)
    except ssl.SSLError as error:
        files = cert if key is None else f"{cert}, {key_setting} {key}"
        apart = f"; if its key is in another file, give {key_setting}" if key is None else ""
        raise UsageError(
            f"{cert_setting} {files}: not a certificate and its private key in PEM"
            f" ({error.reason or error}){apart}",
            damaged=cert,
        ) from None


# ------------------------------------------------------------ what went wrong, in words

_EXPIRED, _NOT_YET, _WRONG_HOST, _WRONG_IP = 10, 9, 62, 64  # of OpenSSL's X509_V_ERR_*
_WRONG_USE = 26

_ALERTS = {
    "CERTIFICATE_REQUIRED": f"it asks clients for a certificate: set {CERT} and {KEY}",
    "UNKNOWN_CA": f"it does not know the issuer of this side's certificate ({CERT}): have one made"
    " by the CA of its --tls-ca",
    "CERTIFICATE_EXPIRED": f"this side's certificate ({CERT}) has expired: have a new one made",
    "CERTIFICATE_REVOKED": f"this side's certificate ({CERT}) is revoked: have a new one made",
    "BAD_CERTIFICATE": f"it does not accept this side's certificate ({CERT})",
    "UNSUPPORTED_CERTIFICATE": f"this side's certificate ({CERT}) is not for clients",
    "CERTIFICATE_UNKNOWN": f"it does not accept this side's certificate ({CERT})",
    "ACCESS_DENIED": "it denies access",
    "PROTOCOL_VERSION": "it does not speak TLS 1.3, and nothing older is spoken here",
}
"""What an alert of the other side means, by the end of OpenSSL's name of it."""

_FOREIGN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNSUPPORTED_PROTOCOL")


def explained(peer: str, error: Exception) -> ConnectionLost:
    """Return the error to raise for one of a TLS connection.

    Parameters
    ----------
    peer
        The other side, for the text.
    error
        Of the `ssl` module, or of the socket.

    Returns
    -------
    `Untrusted` if one side does not accept the other's certificate or protocol; else
    `ConnectionLost`.
    """
    if isinstance(error, ConnectionLost):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"{peer}: {_unverified(error)}")
    reason = str(getattr(error, "reason", None) or "")
    for alert, meaning in _ALERTS.items():
        if reason.endswith(f"ALERT_{alert}"):
            return Untrusted(f"{peer}: {meaning}")
    if reason in _FOREIGN:
        return Untrusted(
            f"{peer} does not speak TLS 1.3 at this port: connect to aiops://..., or start the"
            " server with --tls-cert"
        )
    if isinstance(error, ssl.SSLError):
        return ConnectionLost(f"{peer}: TLS failed ({reason or error})")
    return ConnectionLost(f"{peer}: {getattr(error, 'strerror', None) or error}")


def refused(peer: str, error: Exception) -> str:
    """Return the reason for which a server has refused a client's handshake, as a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{peer}: its certificate is not accepted ({error.verify_message})"
    why = getattr(error, "reason", None) or str(error)
    return f"{peer}: {why or 'it closed the connection in the handshake'}"


def ended_early(peer: str) -> ConnectionLost:
    """Return the error for a server that ends a connection in the midst of the handshake."""
    return ConnectionLost(
        f"{peer} closed the connection in the TLS handshake: if it was started without --tls-cert,"
        " connect to aiops://..."
    )


def _unverified(error: ssl.SSLCertVerificationError) -> str:
    code, text = error.verify_code, error.verify_message
    if code == _EXPIRED:
        return (
            "the certificate has expired: `aiops tls server` makes another, and SIGHUP has the"
            " server read it"
        )
    if code == _NOT_YET:
        return "the certificate is not valid yet: compare the clocks of both machines"
    if code in (_WRONG_HOST, _WRONG_IP):
        return (
            f"the certificate is for other names ({text}): connect by one of its names, or make"
            " one for this with `aiops tls server --host NAME`"
        )
    if code == _WRONG_USE:
        return (
            "the certificate is not for this use: a server's is for servers, and that of a worker"
            " that averages for clients and servers, as `aiops tls client` makes it"
        )
    return f"the certificate was not issued by a CA that is known here ({text}): {CA} names it"
