"""Sphinx's settings: `python -m sphinx -W --keep-going -b html docs docs/_build` needs no network.

The pages load MathJax, which draws their formulas, from the network when they are looked at.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent

project = "mo_fused"
copyright = "the authors of mo_fused"
release = re.findall(r'__version__ = "(.+)"', (DOCS.parent / "mo_fused" / "_version.py").read_text(encoding="utf-8"))[0]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False


def link_files_elsewhere(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files beside docs/, which are no pages (README.md, csrc/README.md), lead to copies of the files."""
    here = (DOCS / page).parent

    def rewritten(link: re.Match[str]) -> str:
        file = (here / link[1]).resolve()
        return link[0] if file.is_relative_to(DOCS) or not file.is_file() else f"](path:{link[1]})"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)", rewritten, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_files_elsewhere)
