"""The reading of a type checker's report: which public names have an unknown type."""

from __future__ import annotations

from typing import Any

import pytest

from docs._tools.api.surface import CORE
from docs._tools.api.types import report, unknown
from tests.rows import each_row


def symbol(name: str, *texts: str, known: bool = False, ambiguous: bool = False) -> dict[str, Any]:
    found = [{"message": text} for text in texts]
    return {
        "name": name,
        "isTypeKnown": known,
        "isTypeAmbiguous": ambiguous,
        "diagnostics": found,
    }


TLS = "aiops.common.tls_files.Tls"
INFERRED = "Type is missing type annotation and could be inferred differently by type checkers"


@each_row(
    ("found", "faults"),
    [
        (symbol(f"{TLS}.ca", known=True), []),
        (symbol(f"{TLS}.ca", INFERRED), [f"{TLS}.ca: {INFERRED}"]),
        (symbol(f"{TLS}.ca", INFERRED, known=True, ambiguous=True), [f"{TLS}.ca: {INFERRED}"]),
        (symbol(f"{TLS}.more", INFERRED), []),
        (symbol("aiops.client.sync.client.Client.ask", INFERRED), []),
        (
            symbol(
                "aiops.client.sync.client.Client.push",
                'Type of parameter "params" is partially unknown\n  Parameter type is "Params"',
            ),
            [],
        ),
        (
            symbol(
                "aiops.client.sync.client.Client.push",
                'Type of parameter "params" is partially unknown\n  Parameter type is "Layout"',
            ),
            [
                'aiops.client.sync.client.Client.push: Type of parameter "params" is partially'
                ' unknown Parameter type is "Layout"'
            ],
        ),
    ],
)
def test_of_a_symbol(found: dict[str, Any], faults: list[str]) -> None:
    """Public members count; not internal ones, nor a public class's own internals."""
    count, lines = unknown({"symbols": [found]}, CORE)
    assert lines == faults
    assert count == (not found["name"].endswith(("more", "ask")))


@pytest.mark.slow
def test_public_names_have_known_types() -> None:
    """Where the checker has been installed, as ``make types-public`` does."""
    pytest.importorskip("basedpyright")
    assert unknown(report())[1] == []
