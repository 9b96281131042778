"""Make certificates: a CA of one's own, and what it issues. Needs the package cryptography."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiops.errors import UsageError

SERVER, CLIENT = "server", "client"
"""The uses of a certificate."""

_EARLIER = datetime.timedelta(minutes=5)  # for clocks that are behind


def make_ca(folder: Path, days: int = 3650) -> None:
    """Make a CA: ``ca.pem`` and ``ca.key`` in a folder.

    Raises
    ------
    UsageError
        When they cannot be written, or the package cryptography is missing.
    """
    need_cryptography()
    key = _new_key()
    _write(folder, "ca", key, _certificate("aiops CA", key, None, days, None))


def issue(
    folder: Path, name: str, days: int, uses: Iterable[str], hosts: Iterable[str] = ()
) -> None:
    """Make a certificate of the folder's CA: ``NAME.pem`` and ``NAME.key`` in it.

    Parameters
    ----------
    folder
        That of the CA.
    name
        Its subject, and the name of its files.
    days
        Days from now until it expires; less than 0: it has expired.
    uses
        `SERVER`, `CLIENT` or both.
    hosts
        The names and IP addresses of a server.

    Raises
    ------
    UsageError
        When there is no CA, a name is invalid, a file cannot be written, or the package
        cryptography is missing.
    """
    need_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise UsageError(f"{name!r} names a file: letters, digits, and any of . @ - _, at most 64")
    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        ca_key: Any = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no CA to sign with ({error}): `aiops tls init {folder}` makes one"
        ) from None
    key = _new_key()
    _write(
        folder, name, key, _certificate(name, key, (ca, ca_key), days, (tuple(uses), tuple(hosts)))
    )


def _certificate(
    name: str,
    key: Any,
    issuer: tuple[Any, Any] | None,
    days: int,
    leaf: tuple[tuple[str, ...], Any] | None,
) -> Any:
    """Return a certificate; without ``issuer`` a CA's own, else with ``leaf``: uses and hosts."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signing_key = key if issuer is None else issuer[1]
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _EARLIER)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=leaf is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
        .add_extension(_key_usage(signs=leaf is None), critical=True)
    )
    if leaf is not None:
        uses, hosts = leaf
        kinds = {
            "server": ExtendedKeyUsageOID.SERVER_AUTH,
            "client": ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        built = built.add_extension(
            x509.ExtendedKeyUsage([kinds[use] for use in uses]), critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(each) for each in hosts])
            built = built.add_extension(names, critical=False)
    return built.sign(signing_key, SHA256())


def _key_usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise UsageError(f"--host {text!r}: not a host's name or IP address ({error})") from None


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _write(folder: Path, name: str, key: Any, certificate: Any) -> None:
    """Write a key that only this user can read, and its certificate; each is there whole or not."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for suffix, data, mode in (
        (".key", private, 0o600),
        (".pem", certificate.public_bytes(Encoding.PEM), 0o644),
    ):
        path, fresh = folder / f"{name}{suffix}", folder / f".{name}{suffix}.{os.getpid()}"
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            fresh.replace(path)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror or error}", output=str(path)
            ) from None


def expiry(path: Path) -> float:
    """Return when the first certificate of a PEM file ends, in seconds since 1970.

    Raises
    ------
    UsageError
        When it cannot be read, or the package cryptography is missing.
    """
    need_cryptography()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no certificate"
        raise UsageError(f"{path} cannot be read: {why}") from None


def need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError(
            "certificates are made with the package cryptography: pip install 'aiops-ps[tls]'"
            " (servers and clients do not need it)"
        ) from None
