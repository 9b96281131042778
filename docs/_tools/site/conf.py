"""The settings of Sphinx. `docs._tools.site` makes the folder of pages that it reads."""

from __future__ import annotations

import os

from aiops import __version__

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras takes it as it is imported

project = "aiops"
author = "The aiops authors"
copyright = "the aiops authors, Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "py:obj"
suppress_warnings = ["myst.header", "ref.python"]  # `url` may be that of several classes

myst_heading_anchors = 4  # as GitHub names them

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes stand with their class
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = True
autoclass_content = "class"
intersphinx_mapping: dict[str, tuple[str, None]] = {}  # a build asks no other machine

html_theme = "furo"
html_title = f"aiops {release}"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_js_files = [("versions.js", {"defer": "defer"})]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "versions.html", "sidebar/scroll-end.html"),
    ]
}
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
