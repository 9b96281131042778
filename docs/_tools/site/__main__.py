"""Build the site: ``python -m docs._tools.site FOLDER``.

Links to other files of the repository lead to GitHub, where its own variables say which repository
that is, as in a workflow; elsewhere they are text.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from docs._tools.site import pages
from hatch_build import repository

HERE = Path(__file__).parent


def main() -> int:
    """Build it; return the exit status."""
    out = Path(sys.argv[1])
    known = repository(os.environ)
    blob = "/".join((known[0], "blob", known[1])) if known else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        pages.write(HERE.parents[2], source, blob)
        shutil.rmtree(out, ignore_errors=True)
        options = ["-W", "--keep-going", "-q", "-j", "2", "-c", str(HERE), "-b", "html"]
        return build_main([*options, "-d", str(source / ".doctrees"), str(source), str(out)])


if __name__ == "__main__":
    sys.exit(main())
