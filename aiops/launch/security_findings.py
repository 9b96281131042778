"""Judge tokens, certificates and connections: what strangers could read, and what ends soon."""

from __future__ import annotations

from collections.abc import Iterator

from aiops.common import urls
from aiops.common.frozen import value
from aiops.launch.findings import BROKEN, GOOD, NOTE, Finding, Reach

SOON = 30 * 86400.0
"""Seconds before the end of a certificate or a token at which there is a note."""


@value
class TokensSeen:
    """A file of tokens.

    Attributes
    ----------
    error
        Why a server would refuse it; empty: it would take it.
    expires
        By name, when each ends: seconds since 1970; None: never.
    """

    error: str = ""
    expires: tuple[tuple[str, float | None], ...] = ()


@value
class CertificateSeen:
    """A certificate that is set, or that a server has shown.

    Attributes
    ----------
    name
        The file, or the server.
    expires
        When it ends: seconds since 1970.
    """

    name: str
    expires: float


def judge_tokens(seen: TokensSeen, now: float) -> Iterator[Finding]:
    """Say whether a token file is private, and which tokens are over or will be."""
    if seen.error:
        yield Finding("tokens", BROKEN, seen.error)
        return
    over = [name for name, until in seen.expires if until is not None and until <= now]
    soon = [name for name, until in seen.expires if until is not None and 0 < until - now <= SOON]
    text = f"{len(seen.expires)} in the file, which is private"
    notes = [("over", over), (f"over within {SOON / 86400:.0f} days", soon)]
    said = "; ".join(f"{', '.join(names)}: {what}" for what, names in notes if names)
    if said:
        advice = "revoke those that are not used, and make new ones: aiops token new"
        yield Finding("tokens", NOTE, f"{text}; {said}", advice)
    else:
        yield Finding("tokens", GOOD, text)


def judge_certificate(seen: CertificateSeen, now: float) -> Finding:
    """Say how long a certificate is valid still."""
    days = (seen.expires - now) / 86400
    if days <= 0:
        text = f"{seen.name} has expired {-days:.0f} days ago"
        return Finding("certificate", BROKEN, text, _RENEW)
    text = f"{seen.name} is valid for {days:.0f} more days"
    if days * 86400 <= SOON:
        return Finding("certificate", NOTE, text, _RENEW)
    return Finding("certificate", GOOD, text)


_RENEW = "renew it (aiops tls server DIR, aiops tls client DIR NAME), and send the server SIGHUP"


def judge_encryption(reach: Reach) -> Iterator[Finding]:
    """Say whether others can read what a server that was reached is sent."""
    if reach.ip is None or urls.is_tls(reach.url):
        return
    if not urls.is_loopback(reach.ip):
        yield Finding(
            "encryption",
            NOTE,
            f"{reach.url} is beyond this machine, and speaks no TLS: who sees the traffic can read"
            " the model and the gradients, and change them",
            "aiops tls init DIR, and --tls-cert; or a tunnel, or a network of your own",
        )
