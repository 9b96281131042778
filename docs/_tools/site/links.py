"""Links of the repository's pages as links of the site.

On GitHub ``docs/`` is a folder of the repository, and on the site it is all there is: what lies
outside it is on GitHub, but for the pages that the site has copies of.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

OUTSIDE: Mapping[str, str] = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository outside ``docs/``, and the site's page of each."""

_LINK = re.compile(r"(?P<image>!?)(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def of_site(text: str, path: str, pages: frozenset[str], blob: str) -> str:
    """Return a page of the repository with the links that it has on the site.

    Parameters
    ----------
    text
        In Markdown. Code stays as it is.
    path
        The page's in the repository, such as ``docs/guide-ray.md``.
    pages
        All files of the site by their path in its folder, such as ``guide-ray.md``.
    blob
        The URL of the repository's files, without a ``/`` at the end; empty: there is none, and
        links to them are text.
    """
    folder = posixpath.dirname(path)
    here = posixpath.dirname(placed(path))

    def rewritten(found: re.Match[str]) -> str:
        target, hash_, part = found["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        aimed = posixpath.normpath(posixpath.join(folder, target))
        within = placed(aimed)
        for known in (within, f"{within}/README.md".removeprefix("./")):
            if known in pages:
                target = posixpath.relpath(known, here or ".")
                break
        else:
            if not blob:
                return found["text"][1:-1]
            target = f"{blob}/{aimed}"
        return f"{found['image']}{found['text']}({target}{hash_}{part})"

    parts = _CODE.split(text)
    joined = _joined(parts)
    return "".join(part if code else _LINK.sub(rewritten, part) for code, part in joined)


def _joined(parts: list[str]) -> list[tuple[bool, str]]:
    """Return parts of a text, and whether each is code; a link whose text has code is one part."""
    found: list[tuple[bool, str]] = []
    for at, part in enumerate(parts):
        block = at % 2 == 1 and part.startswith("```")
        if not block and found and not found[-1][0]:
            found[-1] = False, found[-1][1] + part
        else:
            found.append((block, part))
    return found


def placed(path: str) -> str:
    """Return where on the site a file of the repository is; that of others is outside of it.

    >>> placed("docs/guide-ray.md"), placed("README.md"), placed("examples/gpt.py")
    ('guide-ray.md', 'readme.md', '../examples/gpt.py')
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    return posixpath.relpath(path, "docs")
