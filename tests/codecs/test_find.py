"""A user names a codec; a reader finds it by the name in a part."""

from __future__ import annotations

import re
from importlib import metadata

import numpy as np
import pytest

from aiops.codecs import BUILT_IN, codec_named, find
from aiops.codecs.topk import TopK
from aiops.errors import UsageError
from tests.codecs.thirdparty import Signs
from tests.rows import each_row

HERE = "tests.codecs.thirdparty"


@each_row("name", BUILT_IN)
def test_every_codec_of_ours_is_found_by_its_name(name: str) -> None:
    codec = find(name)
    assert codec.name == name
    assert codec_named(name) is type(codec)
    assert type(codec).make() == codec


@each_row(
    ("spec", "codec"),
    [
        ("topk", TopK()),
        ("topk:", TopK()),
        ("topk:0.05", TopK(fraction=0.05)),
        ("topk:fraction=0.05", TopK(fraction=0.05)),
        ("topk:values=bf16", TopK(values="bf16")),
        ("topk: 0.5 , values = bf16", TopK(fraction=0.5, values="bf16")),
    ],
)
def test_settings_are_read(spec: str, codec: TopK) -> None:
    assert find(spec) == codec
    assert find(codec.spec) == codec


@each_row(
    ("spec", "text"),
    [
        ("in8", "no codec is called 'in8'; did you mean 'int8'?"),
        ("zip", "no codec is called 'zip'; known: "),
        ("topk:size=3", "codec 'topk' has no setting 'size'; known: fraction, values"),
        ("topk:fractoin=3", "codec 'topk' has no setting 'fractoin'; did you mean 'fraction'?"),
        ("topk:few", "codec 'topk': fraction must be a number, not 'few'"),
        ("topk:0", "codec 'topk': fraction is the share of elements that travel, and 0.0 is none"),
        ("topk:nan", "codec 'topk': fraction is the share of elements that travel, and nan"),
        ("topk:1.01", "codec 'topk': fraction is the share"),
        ("topk:0.1,0.2", "codec 'topk' cannot read '0.2'; write setting=value"),
        ("topk:0.1,fraction=1", "codec 'topk' was given 'fraction' twice; leave one out"),
        ("topk:values=fp8", "codec 'topk': values cannot be 'fp8'; choose from int8, bf16"),
        ("lowrank:0", "codec 'lowrank': rank is 0; give a whole number, 1 or more"),
        ("lowrank:2.5", "codec 'lowrank': rank must be a whole number, not '2.5'"),
        ("int8:7", "codec 'int8' cannot read '7'; it has no settings"),
        ("int8:block=7", "codec 'int8' has no setting 'block'; it has none"),
        ("no.such:Thing", "codec 'no.such:Thing': there is no module 'no.such'"),
        (f"{HERE}:Gone", f"codec '{HERE}:Gone': {HERE} has no 'Gone'"),
        (f"{HERE}:np", f"codec '{HERE}:np' is not a class derived from aiops.codecs.Codec"),
        (f"{HERE}:Nameless", f"codec '{HERE}:Nameless': its name is ''; write name = "),
        (f"{HERE}:Thief", "is called 'int8', and so is one of aiops's own"),
        (f"{HERE}:Unset", "the setting table needs a default"),
    ],
)
def test_what_cannot_be(spec: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        find(spec)


@each_row(
    ("kind", "text"),
    [
        ("NoEncoder", "NoEncoder has no method encoder(): write it"),
        ("NoWrite", "Unwritten has no method write(): write it"),
        ("NoReturn", "encoder() returned None, and it must return an aiops.codecs.Encoder"),
        ("NoDecode", "NoDecode has no method decode(): write it"),
        ("Failing", "decode() fails with IndexError: there is no such thing ("),
        (
            "Refusing",
            "check() refuses what its own encoder wrote of a tensor of [16, 32]: it has 516 bytes"
            " instead of 516; check() must return None for a payload that decode() can read",
        ),
        ("Infinite", "decode() gives inf for a tensor of numbers from -1 to 1: its values must be"),
        ("Adding", "decode() without add=True goes by what is in out: it must overwrite that"),
        ("Overwriting", "decode() with add=True does not add to what is in out"),
    ],
)
def test_one_of_a_users_that_cannot_work_is_refused_before_a_run(kind: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^codec '[\w-]+' \({HERE}:{kind}\): ") as caught:
        find(f"{HERE}:{kind}")
    assert text in str(caught.value)


@each_row("kind", ["ForLarge", "ForNone"])
def test_one_is_tried_with_a_tensor_that_a_run_would_encode(kind: str) -> None:
    assert find(f"{HERE}:{kind}").name.startswith("for-")


def test_somebody_elses_in_one_file() -> None:
    codec = find(f"{HERE}:Signs:size=0.5")
    assert codec == Signs(size=0.5)
    assert codec.spec == f"{HERE}:Signs:size=0.5"
    assert find(codec.spec) == codec
    assert codec_named("signs") is Signs
    assert find("signs:2") == Signs(size=2.0)
    with pytest.raises(UsageError, match="is called"):
        find(f"{HERE}:Double")
    encoder = codec.encoder((3,), feedback=True)
    payload = np.frombuffer(encoder.encode(np.array([3, -2, 0], np.float32)), np.uint8)
    assert Signs.check(payload, (3,)) is None
    assert encoder.rest is not None
    assert encoder.rest.tolist() == [2.5, -1.5, 0.0]
    encoder.take_back()
    assert encoder.rest.tolist() == [3.0, -2.0, 0.0]


def test_an_installed_package_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("signs", f"{HERE}:Signs", "aiops.codecs")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr("aiops.codecs._known", {})
    assert codec_named("signs") is None
    assert find("signs:3.0") == Signs(size=3.0)
    assert codec_named("signs") is Signs


def test_a_name_from_the_wire_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.codecs._known", {})
    assert codec_named(f"{HERE}:Signs") is None
    assert codec_named("") is None
