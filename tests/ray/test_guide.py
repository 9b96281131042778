"""docs/guide-ray.md: its blocks compile, and call what there is; Ray is not needed for that."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import aiops.ray
from aiops.serving.config import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide-ray.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
EXAMPLES = sorted((ROOT / "examples" / "on_ray").glob("*.py"))
SOURCES = {**BLOCKS, **{path.name: path.read_text("utf-8") for path in EXAMPLES}}


def settings_of_train() -> set[str]:
    tree = ast.parse((ROOT / "aiops" / "ray" / "training.py").read_text("utf-8"))
    (train,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    return {argument.arg for argument in train.args.kwonlyargs}


@pytest.mark.parametrize("name", SOURCES)
def test_a_block_calls_what_there_is(name: str) -> None:
    tree = ast.parse(SOURCES[name])
    known = settings_of_train() | set(Config.__dataclass_fields__)
    used = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "aiops.ray":
            continue
        assert node.attr in aiops.ray.__all__
        used.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "aiops.ray.train":
            assert {keyword.arg for keyword in node.keywords} <= known
    assert used


def test_the_table_of_settings_is_of_train() -> None:
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", PAGE.partition("## When")[0], re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert named <= settings_of_train() | set(Config.__dataclass_fields__)
    ours = {"loop", "placement_strategy", "server_restarts", "seed"}  # those of its docstring alone
    assert settings_of_train() - ours <= named


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match=r"module 'aiops\.ray' has no attribute 'trian'"):
        aiops.ray.trian  # type: ignore[attr-defined]  # noqa: B018
