"""What `aiops doctor` says of tokens, certificates and connections."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from aiops.cli import token as commands
from aiops.cli.doctor import tokens_seen
from aiops.common import urls
from aiops.launch import measuring
from aiops.launch.findings import BROKEN, GOOD, NOTE, Reach
from aiops.launch.security_findings import (
    CertificateSeen,
    TokensSeen,
    judge_certificate,
    judge_encryption,
    judge_tokens,
)
from tests.certificates import ours
from tests.launch.test_findings import said
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

DAY = 86400.0


@each_row(
    ("expires", "state", "text"),
    [
        (31 * DAY, GOOD, "is valid for 31 more days"),
        (29 * DAY, NOTE, "is valid for 29 more days → renew it"),
        (-2 * DAY, BROKEN, "has expired 2 days ago → renew it"),
    ],
)
def test_a_certificate_that_ends_soon(expires: float, state: str, text: str) -> None:
    found = judge_certificate(CertificateSeen("a.pem", 1e9 + expires), 1e9)
    assert f"certificate: a.pem {text}" in said([found], state)


def test_certificates_are_those_that_are_set(tmp_path: Path) -> None:
    expired = ours().issue("expired", "localhost", expired=True)
    found = measuring.certificates({"AIOPS_TLS_CERT": str(expired), "AIOPS_TLS_CA": str(tmp_path)})
    assert [each.name for each in found] == [f"AIOPS_TLS_CERT {expired}"]
    assert found[0].expires < time.time()


def test_a_server_shows_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPS_TLS_CA", str(ours().ca))
    with ServerThread(policy="asgd", kernels="numpy", **ours().settings(mutual=False)) as running:
        [server] = urls.parse_all(running.url)
        found = measuring.served_certificate(server, "127.0.0.1", PATIENCE)
    assert found is not None
    assert found.expires > time.time()


@each_row("mode", [0o600, 0o604, 0o640])
def test_a_file_of_tokens_that_others_can_read(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    commands.new(file, "a", "admin")
    file.chmod(mode)
    found = list(judge_tokens(tokens_seen(file), time.time()))
    if mode & 0o007:
        assert "is open to other users (mode 604): chmod 600" in said(found, BROKEN)
    else:
        assert said(found, GOOD) == "tokens: 1 in the file, which is private → "


def test_tokens_that_end() -> None:
    seen = TokensSeen("", (("a", None), ("b", 1e9 - 1), ("c", 1e9 + DAY)))
    text = said(judge_tokens(seen, 1e9), NOTE)
    assert "3 in the file, which is private; b: over; c: over within 30 days" in text


@each_row(
    ("url", "ip", "noted"),
    [
        ("aiops://h:1", "10.0.0.1", True),
        ("aiops://h:1", "127.0.0.1", False),
        ("aiops+tls://h:1", "10.0.0.1", False),
        ("aiops://h:1", None, False),
    ],
)
def test_a_server_beyond_this_machine_without_tls(url: str, ip: str | None, noted: bool) -> None:
    found = list(judge_encryption(Reach(url, {}, ip)))
    assert ("speaks no TLS" in said(found, NOTE)) is noted
