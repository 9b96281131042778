"""What the package index shows of the project: the README, with links that lead to the repository.

On the index a link to ``docs/install.md`` leads nowhere. Where a workflow of GitHub's builds the
package, its variables name the repository and the tag, and links become absolute. Elsewhere, as in
an editable installation, the README stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def repository(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the repository's URL, and the tag or commit that is built; None outside a workflow."""
    name = environment.get("GITHUB_REPOSITORY")
    if not name:
        return None
    tag = environment.get("GITHUB_REF_TYPE") == "tag"
    version = environment.get("GITHUB_REF_NAME" if tag else "GITHUB_SHA") or "main"
    return f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}", version


def absolute(text: str, url: str, version: str) -> str:
    """Return a page with its relative links to files of a repository made absolute.

    Parameters
    ----------
    text
        The page, in Markdown. Blocks of code stay as they are.
    url
        The repository's.
    version
        A tag, a branch or a commit.
    """

    def rewritten(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}{found['text']}({url}/{kind}/{version}/{target})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)


class CustomMetadataHook(MetadataHookInterface):
    """Adds ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        place = repository(os.environ)
        metadata["urls"] = {}
        if place is not None:
            url, version = place
            text = absolute(text, url, version)
            metadata["urls"] = {
                "Source": url,
                "Documentation": f"{url}/blob/{version}/README.md#pages",
                "Changelog": f"{url}/blob/{version}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
