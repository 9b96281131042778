"""The site of each release beside the others: ``python -m docs._tools.site.versions FOLDER``.

The folder has one for each version, such as ``0.1.0``, and ``dev`` for the newest commit. Written
are ``index.html``, which leads to the newest release, ``versions.html``, which lists all, and
``versions.json``, of which each page makes the list in its side bar (``_static/versions.js``).
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)$")
_PAGE = '<!doctype html><html lang="en"><meta charset="utf-8"><title>aiops</title>'


def write(folder: Path) -> None:
    """Write them; without a release the first leads to ``dev``."""
    found = {path.name for path in folder.iterdir() if (path / "index.html").exists()}
    releases = sorted((name for name in found if _RELEASE.match(name)), key=_order, reverse=True)
    listed = [*releases, *sorted(found.difference(releases))]
    newest = listed[0]
    leads = f'<meta http-equiv="refresh" content="0; url={newest}/index.html">'
    text = f'{_PAGE}{leads}<a href="{newest}/index.html">aiops {html.escape(newest)}</a></html>\n'
    (folder / "index.html").write_text(text, encoding="utf-8")
    rows = "".join(
        f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a></li>'
        for name in listed
    )
    page = f"{_PAGE}<h1>aiops, by version</h1><ul>{rows}</ul></html>\n"
    (folder / "versions.html").write_text(page, encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(listed) + "\n", encoding="utf-8")


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
