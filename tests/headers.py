"""Headers of messages to change: values of each type of field, good ones and bad ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiops.model.parts import Part
from aiops.wire.encoding import KINDS

GOOD: dict[str, Any] = {
    "UInt": 5,
    "Have": -1,
    "Batches": 3,
    "Real": 0.5,
    "OptReal": None,
    "Text": "x",
    "Reason": "x",
    "bool": True,
    "Nonce": b"n" * 16,
    "Bytes32": b"b" * 32,
    "Blob": b"",
    "Plain": {"a": 1},
    "Offered": (("w", "float32", (2,)),),
    "Rows": (("w", "float32", (2,), 0),),
    "Sparse": (("t", 3, 2, "float32", "uniform", 0.5, 0),),
    "Members": (("10.0.0.1", 7171, True),),
    "Parts": (Part(0, 8, "raw", 8, 1),),
    "Wants": ((0, 1, -1), (2, 4, 7)),
    "Ranges": ((0, 8, 3), (8, 12, 4)),
    "ShardTable": (("", 7172, 8), ("10.0.0.2", 7173, 16)),
    "Gate": (0.25, 0.0),
    "Factors": (0.5, 0.0, 100.0),
    "Versions": (7, 0, 2**53 - 1),
    "Positive": 5,
    "Numbers": (7, 0, 2**53 - 1),
    "Examples": ((1, 0, 8), (1, 8, 12)),
    "Logged": (("loss", 0.25), ("é" * 32, -1e308)),
}
"""A value of each type."""

BAD: dict[str, list[Any]] = {
    "UInt": [-1, 2**53, 2**63, 1.0, True, "1", None, b"\1", (1,), {"a": 1}],
    "Have": [-2, 2**53, 2**63, 0.0, False, None, "x"],
    "Batches": [0, -1, 2**20 + 1, 2**60, 2**63, 1.0, True, None],
    "Real": [1, None, float("nan"), float("inf"), float("-inf"), "0.5", True],
    "OptReal": [1, float("nan"), "x", False],
    "Text": [b"x", 1, None, "x" * 4097, ("x",)],
    "Reason": [b"x", 1, None, "x" * 257, ("x",)],
    "bool": [0, 1, None, "true"],
    "Nonce": [b"n" * 15, b"n" * 65, b"", "n" * 16, None],
    "Bytes32": [b"n" * 31, b"n" * 33, b"n" * 4096, "n" * 32, None],
    "Blob": ["x", None, 0, (1,)],
    "Plain": [
        None,
        (),
        "x",
        {"a": {"b": {"c": {"d": {"e": {"f": {}}}}}}},
        {"a": ((((((),),),),),)},
    ],
    "Offered": [
        None,
        {},
        ("w",),
        (("w", "float32"),),
        (("w", "float32", (1,), 0),),
        ((b"w", "float32", (1,)),),
        (("w", 1, (1,)),),
        (("w", "float32", 1),),
        (("w", "float32", (-1,)),),
        (("w", "float32", (2**63,)),),
        (("w", "float32", (1.0,)),),
        (("w", "float32", (True,)),),
        (("w", "float32", (1,) * 33),),
    ],
    "Rows": [
        None,
        (("w", "float32", (1,)),),
        (("w", "float32", (1,), -1),),
        (("w", "float32", (1,), 2**53),),
        (("w", "float32", (1,), 0, 0),),
        (("w", "float32", (1,), None),),
    ],
    "Sparse": [
        None,
        {},
        ("t",),
        (("t", 3, 2, "float32", "uniform", 0.5),),
        (("t", 3, 2, "float32", "uniform", 0.5, 0, 0),),
        ((b"t", 3, 2, "float32", "uniform", 0.5, 0),),
        (("t", -1, 2, "float32", "uniform", 0.5, 0),),
        (("t", 3, 2.0, "float32", "uniform", 0.5, 0),),
        (("t", 3, 2, 32, "uniform", 0.5, 0),),
        (("t", 3, 2, "float32", None, 0.5, 0),),
        (("t", 3, 2, "float32", "uniform", 1, 0),),
        (("t", 3, 2, "float32", "uniform", float("inf"), 0),),
        (("t", 3, 2, "float32", "uniform", 0.5, True),),
        (("t", 3, 2, "float32", "uniform", 0.5, 2**63),),
    ],
    "Members": [
        None,
        (("h", 1),),
        (("h", 1, True, 1),),
        ((b"h", 1, True),),
        (("h", 0, True),),
        (("h", 65536, True),),
        (("h", True, True),),
        (("h", 1, 1),),
        (["h", 1, True, {}],),
    ],
    "Wants": [
        None,
        (1, 2, 3),
        ((0, 1),),
        ((0, 0, 1),),
        ((0, 1, -2),),
        ((0, 1, 2**53),),
        ((0, 2**53, 1),),
        ((0, True, 1),),
        ((-1, 1, 1),),
        ((0, 2, 1), (1, 3, 1)),
    ],
    "Ranges": [
        None,
        ((0, 8),),
        ((8, 8, 1),),
        ((0, 8, -1),),
        ((0, 2**53, 1),),
        ((0, 8, 1), (4, 12, 1)),
        ((0, True, 1),),
    ],
    "ShardTable": [
        None,
        (("h", 1),),
        ((b"h", 1, 0),),
        (("h", 0, 0),),
        (("h", 65536, 0),),
        (("h", 1, -1),),
        (("h", 1, 2**53),),
        (("h", 1, 0.0),),
    ],
    "Versions": [None, 1, {}, (-1,), (2**53,), (2**63,), (1.0,), (True,), ("1",), (0,) * 1026],
    "Positive": [0, -1, 2**53, 2**63, 1.0, True, None, "1"],
    "Numbers": [None, 1, (-1,), (2**53,), (1.0,), (True,), ("1",), (0,) * 1025],
    "Examples": [
        *(None, (1, 0, 8), ((1, 0),), ((1, 8, 8),), ((1, 0, 2**53),), ((-1, 0, 8),)),
        *(((1, -1, 8),), ((1, False, 8),), ((1.0, 0, 8),), ((1, 0, 8),) * 1025),
    ],
    "Logged": [
        *(None, {"loss": 1.0}, ("loss", 1.0), (("loss",),), (("loss", 1),), (("loss", True),)),
        *((("loss", 1.0, 2.0),), ((b"loss", 1.0),), (("loss", float("nan")),)),
        *((("loss", float("-inf")),), (("é" * 33, 1.0),), (("a", 1.0), ("a", 2.0))),
        tuple((f"n{k}", 1.0) for k in range(17)),
    ],
    "Factors": [None, 0.5, (1,), (-0.5,), (100.5,), (float("nan"),), (float("inf"),)],
    "Gate": [None, (0.5,), (0.5, 1), (0.5, -0.5), (0.5, float("nan")), (0.5, 0.5, 0.5)],
}
"""Values that each type must not take."""


def header(kind: str, **changes: Any) -> dict[str, Any]:
    """The map of a good message of that kind, with changes."""
    fields = {f.name: GOOD[str(f.type)] for f in dataclasses.fields(KINDS[kind])}
    return {"kind": kind, **fields, **changes}
