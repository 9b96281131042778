"""The list of public names on docs/api.md: each with its signature and its first line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from docs._tools.api.surface import MADE_BY_SERVE, MODULES, Name, members, names

BEGIN, END = "<!-- names: `make docs` writes them -->", "<!-- end of names -->"


def update(path: Path) -> None:
    """Write the list between its marks."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the list that fits the code."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has not both {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{listing()}\n{END}{after}"


def listing(modules: Sequence[str] = MODULES) -> str:
    """Return the list of modules: a heading for each, and below it its names."""
    found = list(names(modules))
    lines: list[str] = []
    for module in modules:
        lines += [f"### `{module}`", "", "```text"]
        for name in found:
            if name.module == module:
                lines += _entry(name)
        lines += ["```", ""]
    return "\n".join(lines)


def _entry(name: Name) -> Iterator[str]:
    value = name.value
    if not callable(value):
        yield f"{name.name}: {type(value).__name__}"
        return
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        yield f"class {name.name}" + (f"({', '.join(bases)})" if _is_error(value) else "")
        if not _is_error(value) and name.name not in MADE_BY_SERVE:
            yield f"    {_call('', value)}"
    else:
        yield _call(name.name, value)
    yield f"    {_first_line(value)}"
    if inspect.isclass(value) and not _is_error(value):
        for member, defined in members(value):
            yield f"    .{_member(member, defined)}"


def _is_error(value: type) -> bool:
    return issubclass(value, Exception)


def _member(name: str, defined: Any) -> str:
    if isinstance(defined, classmethod | staticmethod):
        return _call(name, defined.__func__)
    if isinstance(defined, FunctionType):
        return ("async " if inspect.iscoroutinefunction(defined) else "") + _call(name, defined)
    return name


def _call(name: str, function: Any) -> str:
    """Return a call with its parameters, the first (self) left out where there is one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{name}(...)"
    given = [
        each.replace(annotation=each.empty)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls") and not each.name.startswith("_")
    ]
    return f"{name}{signature.replace(parameters=given, return_annotation=signature.empty)}"


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]
