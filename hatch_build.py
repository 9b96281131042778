"""What the build adds to the package: its page on the index, and compiled code.

**The page** is the README, with links that lead to the repository. On the index a link to
``docs/install.md`` leads nowhere. Where a workflow of GitHub's builds the package, its variables
name the repository and the tag, and links become absolute. Elsewhere, as in an editable
installation, the README stays as it is.

**Compiled code** is one library of the C files in ``aiops/compiled``, built by the system's C
compiler. Without one, or where it fails, the package is the same without it. ``AIOPS_COMPILED=0``
builds none, and ``AIOPS_COMPILED=1`` fails where none can be built. ``CC`` and ``CFLAGS`` are
heeded, but for flags by which a library changes the arithmetic of the process that loads it.
``python hatch_build.py [FOLDER [FLAG ...]]`` builds it alone, in a folder or in its place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


# ---------------------------------------------------------------- compiled code

_SOURCES = Path("aiops", "compiled")
_LIBRARY = "_core.abi3.so"
_FLAGS = (
    *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC"),
    # -Ofast or -ffast-math in CFLAGS would have the library set the processor to flush subnormal
    # numbers in the whole process, and change bits: the last flags count.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fmath-errno"),
    *("-ffp-contract=off", "-fvisibility=hidden"),
)
_PATIENCE = 300.0  # seconds for the compiler


class CannotCompile(Exception):
    """There is no compiled code here; the text says why."""


def compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the C compiler: ``CC``, or the first that the system has.

    Raises
    ------
    CannotCompile
        When there is none, or it would lack Python's headers.
    """
    headers = Path(sysconfig.get_path("include"))
    if os.name != "posix" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotCompile("it is for POSIX systems, and for Python with its global lock")
    if not (headers / "Python.h").is_file():
        raise CannotCompile(f"Python's headers are not in {headers}")
    given = shlex.split(environment.get("CC", ""))
    found = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    if not given and not found:
        raise CannotCompile("there is no C compiler")
    apple = sys.platform == "darwin"
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if apple else ["-shared"]
    own = shlex.split(environment.get("CFLAGS", ""))
    own += shlex.split(environment.get("ARCHFLAGS", "")) if apple else []
    return [*(given or found[:1]), *own, *shared, *_FLAGS, f"-I{headers}"]


def sources(root: Path) -> list[Path]:
    """Return the files that the library is built from, in the order of their names."""
    folder = root / _SOURCES
    return sorted((*folder.glob("*.c"), *folder.glob("*.h")), key=lambda path: path.name)


def compile_core(
    root: Path, into: Path, flags: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Path:
    """Compile the library, and try to load it; return its path.

    Parameters
    ----------
    root, into
        The repository, and the folder for the library. One that is there already is replaced, or
        removed if this fails.
    flags
        More flags of the compiler. With any the library is not loaded: a sanitizer's needs more.
    environment
        For ``CC`` and ``CFLAGS``.

    Raises
    ------
    CannotCompile
        When that is not possible here.
    """
    into.mkdir(parents=True, exist_ok=True)
    library = into / _LIBRARY
    with tempfile.TemporaryDirectory(dir=into) as folder:
        files, made = sources(root), Path(folder, _LIBRARY)
        try:
            # A library that is older than its sources is known by this, and not used.
            found = hashlib.sha256()
            for path in files:
                found.update(hashlib.sha256(path.read_bytes()).digest())
            digest = f'-DSOURCE="{found.hexdigest()}"'
            texts = [str(path) for path in files if path.suffix == ".c"]
            commands = [[*compiler(environment), digest, *flags, *texts, "-o", str(made)]]
            if not flags:
                load = "import sys; sys.path[:0] = sys.argv[1:]; import _core"
                commands.append([sys.executable, "-I", "-c", load, folder])
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
                if done.returncode:
                    raise CannotCompile(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
            os.replace(made, library)  # another process may run the one that was there
        except (CannotCompile, OSError, subprocess.TimeoutExpired) as error:
            library.unlink(missing_ok=True)
            raise CannotCompile(str(error)) from None
    return library


def platform_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the platform of a wheel's tag: that which the compiler builds for.

    On macOS a compiler heeds ``MACOSX_DEPLOYMENT_TARGET``, and is given ``ARCHFLAGS``. On Linux
    auditwheel finds the oldest systems that have what the library needs, and renames the wheel.
    """
    from packaging.tags import platform_tags

    own = next(tag for tag in platform_tags() if not tag.startswith(("many", "musl")))
    apple = re.fullmatch(r"macosx_(\d+)_(\d+)_(\w+)", own)
    if apple is None:
        return own
    target = environment.get("MACOSX_DEPLOYMENT_TARGET") or f"{apple[1]}.{apple[2]}"
    machines = {*re.findall(r"-arch\s+(\S+)", environment.get("ARCHFLAGS", ""))} or {apple[3]}
    machine = machines.pop() if len(machines) == 1 else "universal2"
    major, minor = (*map(int, target.split(".")), 0)[:2]
    if machine == "arm64":  # of which there is none before
        major, minor = max((major, minor), (11, 0))
    return f"macosx_{major}_{minor if major < 11 else 0}_{machine}"


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds compiled code to a wheel, or puts it beside its sources, if it can be built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it."""
        wanted = os.environ.get("AIOPS_COMPILED", "")
        if wanted == "0":
            return
        root = Path(self.root)
        editable = version == "editable"
        into = root / _SOURCES if editable else Path(tempfile.mkdtemp())
        try:
            library = compile_core(root, into)
        except CannotCompile as error:
            if wanted == "1":
                raise
            self.app.display_warning(f"compiled code is left out: {error}")
            return
        finally:
            self._made = None if editable else into
        if not editable:
            build_data["force_include"][str(library)] = str(_SOURCES / _LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform_of()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built elsewhere."""
        if getattr(self, "_made", None) is not None:
            shutil.rmtree(self._made, ignore_errors=True)


if __name__ == "__main__":
    ROOT = Path(__file__).parent
    print(compile_core(ROOT, Path([*sys.argv, ROOT / _SOURCES][1]), sys.argv[2:]))
