"""The pages of the site, in the order in which its menu has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs._tools.api.surface import MODULES, Name, members, names
from docs._tools.site.links import OUTSIDE, of_site, placed

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Start": ("readme", "install"),
    "Tutorials": ("guide-running", "guide-frameworks", "guide-simulator", "guide-own-algorithm"),
    "How to": (
        *("guide-policies", "guide-bandwidth", "guide-monitoring", "guide-security"),
        *("guide-clusters", "guide-ray", "guide-data", "tables", "filters", "gpu", "testing"),
    ),
    "Reference": (
        *("api", "reference/index", "algorithms/README", "codecs", "state", "wire"),
        "changelog",
    ),
    "Explanation": (
        *("theory", "robustness", "experiments", "results/experiments/README"),
        *("results/README", "contributing", "security"),
    ),
}
"""The parts of the menu, and the pages in each."""

BELOW: Mapping[str, str] = {
    "guide-frameworks": "frameworks/*.md",
    "algorithms/README": "algorithms/*.md",
    "wire": "wire-*.md",
}
"""Pages that have others below them in the menu, and the pattern of those."""


def write(root: Path, out: Path, blob: str) -> None:
    """Write all pages of the site into a folder.

    Parameters
    ----------
    root
        The repository's.
    out
        The folder, which is empty or there is none.
    blob
        The URL of the repository's files (`of_site`).
    """
    sources = {placed(path): root / path for path in OUTSIDE}
    for file in sorted((root / "docs").rglob("*")):
        path = file.relative_to(root / "docs")
        if file.is_file() and path.parts[0] != "_tools" and file.suffix not in {".py", ".pyc"}:
            sources[path.as_posix()] = file
    pages = frozenset(sources)
    for page, file in sources.items():
        made = out / page
        made.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            path = file.relative_to(root).as_posix()
            text = of_site(file.read_text(encoding="utf-8"), path, pages, blob)
            made.write_text(text + _below(page, pages), encoding="utf-8")
        else:
            made.write_bytes(file.read_bytes())
    for page, text in (*_reference(), ("index.md", _index())):
        (out / page).parent.mkdir(exist_ok=True)
        (out / page).write_text(text, encoding="utf-8")


def _index() -> str:
    """Return the first page: what there is, by purpose."""
    parts = [
        "# aiops\n\nAn asyncio-native parameter server for asynchronous SGD in Python:"
        " [what it is, and a first run](readme.md)."
    ]
    for section, pages in SECTIONS.items():
        parts.append(_toctree(pages, f":caption: {section}\n:maxdepth: 1"))
    return "\n\n".join(parts) + "\n"


def _below(page: str, pages: frozenset[str]) -> str:
    """Return what to add to a page that has others below it."""
    pattern = BELOW.get(page.removesuffix(".md"))
    if pattern is None:
        return ""
    found = sorted(p for p in pages if Path(p).match(pattern) and p != page)
    folder = Path(page).parent
    names_ = tuple(Path(p).relative_to(folder).with_suffix("").as_posix() for p in found)
    return "\n\n" + _toctree(names_, ":hidden:") + "\n"


def _toctree(pages: tuple[str, ...], options: str) -> str:
    return "```{toctree}\n" + options + "\n\n" + "\n".join(pages) + "\n```"


def _members(value: object) -> str:
    """Return the option that shows what is public of a class and has a docstring of its own."""
    if not isinstance(value, type):
        return ""
    shown = [name for name, member in members(value) if getattr(member, "__doc__", None)]
    return f"   :members: {', '.join(shown)}\n" if shown else ""


def _reference() -> Iterator[tuple[str, str]]:
    """Yield a page for each public module, with the docstrings of its names."""
    listed: dict[str, list[Name]] = defaultdict(list)
    for name in names(MODULES):
        if callable(name.value):
            listed[name.module].append(name)
    for module, found in listed.items():
        parts = [module, "=" * len(module)]
        for name in found:
            kind = "autoclass" if isinstance(name.value, type) else "autofunction"
            parts.append(f".. {kind}:: {module}.{name.name}\n{_members(name.value)}")
        yield f"reference/{module}.rst", "\n".join(parts)
    intro = "# API\n\nThe docstrings of the [public names](../api.md), by module.\n\n"
    yield "reference/index.md", intro + _toctree((*listed,), ":maxdepth: 1") + "\n"
