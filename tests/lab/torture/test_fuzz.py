"""The inputs that a fuzzer has found to reach far, and mutations of them: no parser is broken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aiops.lab.torture.fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MUTATIONS = 4
"""Of each input. `aiops torture fuzz --corpus tests/lab/torture/corpus` does it for long."""


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Change, insert, cut or repeat a few bytes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(4):
            case 0 if at < len(found):
                found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC6, 0xCE, 0xFF, found[at] ^ 1))
            case 1:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del found[at : at + rng.randint(1, 16)]
            case _:
                found[at:at] = found[at : at + rng.randint(1, 64)]
    return bytes(found)


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_parser(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs, "there is a corpus"
    rng = random.Random(target)
    for path in inputs:
        data = path.read_bytes()
        TARGETS[target](data)
        for _ in range(MUTATIONS):
            TARGETS[target](mutated(rng, data))


@pytest.mark.parametrize("target", TARGETS)
def test_the_smallest_inputs(target: str) -> None:
    for data in (b"", b"\0", b"\xff", bytes(64), b"\xff" * 64):
        TARGETS[target](data)
