"""Sphinx's settings. ``make docs`` builds the site into build/docs; nothing is fetched."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import kinformer  # noqa: E402

project = "Kinformer"
author = "The Kinformer authors"
copyright = "The Kinformer authors, MIT licence"
version = release = kinformer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "generator"]
exclude_patterns = ["README.md", "generator", "assets"]
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_title = "Kinformer"
(HERE / "assets" / "small").mkdir(parents=True, exist_ok=True)
html_static_path = ["assets"]
html_css_files = ["style.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0062a3", "color-brand-content": "#0062a3"},
    "dark_css_variables": {"color-brand-primary": "#5aa9e6", "color-brand-content": "#5aa9e6"},
}
html_show_sourcelink = False
html_search_scorer = str(HERE / "generator" / "scorer.js")
