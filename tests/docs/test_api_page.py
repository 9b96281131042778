"""docs/api.md lists the public names as the code has them: a change of one is a change of it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from docs._tools.api.__main__ import main
from docs._tools.api.page import BEGIN, END, listing, page
from docs._tools.api.surface import (
    CORE,
    INTERNAL,
    MADE_BY_SERVE,
    MODULES,
    MOST,
    members,
    names,
)

PATH = Path(__file__).parents[2] / "docs" / "api.md"
PAGE = PATH.read_text(encoding="utf-8")


def listed() -> str:
    """The list of the page."""
    return PAGE.partition(BEGIN)[2].partition(END)[0]


FRAMEWORKS = {
    "aiops.client.torch": "torch",
    "aiops.client.jax": "jax",
    "aiops.client.keras": "keras",
    "aiops.data.torch": "torch",
    "aiops.ray": "ray",
}
"""The public modules that need a package, and the package."""


def test_the_core_s_names_are_those_that_were_agreed() -> None:
    assert listing(CORE) in PAGE, "a public name has changed: see docs/api.md, then run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "package"), FRAMEWORKS.items())
def test_a_framework_s_names_are_those_that_were_agreed(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip(package)
    assert listing([module]) in PAGE, "a public name has changed: run `make docs`"


def test_every_module_is_in_one_of_both() -> None:
    assert (*CORE, *FRAMEWORKS) == MODULES


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "__defaults__", (CORE,))
    (tmp_path / "page.md").write_text(page(PAGE).replace(listing(), ""), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["api", str(tmp_path / "page.md")])
    main()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page(PAGE)


def test_they_are_few() -> None:
    assert len(re.findall(r"^(?:class \w|\w+\(|\w+: )", listed(), re.MULTILINE)) <= MOST


def test_every_module_of_the_page_is_there() -> None:
    assert re.findall(r"^### `(aiops[\w.]*)`$", PAGE, re.MULTILINE) == list(MODULES)


def test_what_is_internal_is_there() -> None:
    """The table does not keep names of members that have gone."""
    for each in names(CORE):
        for member in INTERNAL.get(each.name, "").split():
            source = inspect.getsource(sys.modules[each.value.__module__])
            assert hasattr(each.value, member) or re.search(rf"\b{member}\b", source), member
            assert member not in dict(members(each.value))
    assert {name for name in INTERNAL if f"class {name}\n" not in listed()} == set()


def test_what_is_not_listed_is_internal() -> None:
    """Other names can be imported; that makes them no promise."""
    assert importlib.import_module("aiops.errors").nearest
    assert "nearest" not in listed()


def test_every_name_says_what_it_is() -> None:
    for name in names(CORE):
        if callable(name.value):
            assert (name.value.__doc__ or "").strip(), name


def test_what_serve_makes_is_listed_without_its_constructor() -> None:
    for name in MADE_BY_SERVE:
        assert f"class {name}\n    (" not in listed()
        assert f"class {name}\n    " in listed()
