"""The site: how Sphinx makes it from the Markdown files of this repository, which stay as they are.

``python -m sphinx --fail-on-warning -c docs . out/site``, in the root of the repository, writes it to `out/site`. A
link, anchor or picture that leads nowhere is a warning.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "sync_batchnorm"
version = release = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sync_batchnorm/__init__.py").read_text(), re.M)[0]

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "docs/**.md", "tests/simulated_gpus/README.md"]
exclude_patterns = [".*", "build", "dist", "out"]
nitpicky = True
smartquotes = False  # so that messages are found as they are pasted
myst_heading_anchors = 4
copybutton_selector = ".highlight-python pre, .highlight-bash pre"
pygments_style, pygments_dark_style = "default", "github-dark"

html_theme = "furo"
html_title = f"sync_batchnorm {version}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_copy_source = False
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")
if REPOSITORY:  # in a workflow: each page has a link to its source
    html_theme_options = {"source_repository": f"https://github.com/{REPOSITORY}/", "source_branch": "main"}
    html_theme_options["source_directory"] = ""
html_show_copyright = html_use_index = False

NAVIGATION = {
    "Train": [
        *("docs/usage", "docs/losses", "docs/frameworks", "docs/processes", "docs/migrating"),
        "docs/extending",
    ],
    "When something is wrong": ["docs/troubleshooting", "docs/diagnosing"],
    "Look up": ["docs/api", "docs/how-it-works", "docs/examples/README", "docs/benchmarks/README", "docs/changelog"],
    "Change it": ["docs/contributing", "tests/simulated_gpus/README"],
}


def extend(app: Sphinx, name: str, source: list[str]) -> None:
    """Give a page what GitHub would not show: tables of contents, and messages as headings."""
    if name == "README":
        issues = f"[issues](https://github.com/{REPOSITORY}/issues)" if REPOSITORY else "issues"
        source[0] = source[0].replace("[issues](../../issues)", issues)
        for caption, pages in NAVIGATION.items():
            source[0] += toctree(pages, f":caption: {caption}")
    elif name == "docs/benchmarks/README":
        pages = sorted(f"{path.parent.name}/README" for path in ROOT.glob("docs/benchmarks/*/README.md"))
        source[0] += toctree(pages)
    elif name == "docs/troubleshooting":
        # The search leads to headings, here to the messages that the page quotes. Several may share a text.
        source[0] = re.sub(r"^(> .+\n\n)(?=> )", r"\1See below the next message.\n\n", source[0], flags=re.MULTILINE)
        source[0] = re.sub(r"^> (.+)$", r"### \1", source[0], flags=re.MULTILINE)


def toctree(pages: list[str], *options: str) -> str:
    return "\n".join(["\n```{toctree}", ":hidden:", *options, "", *pages, "```\n"])


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Give the first page the name that servers look for."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", extend)
    app.connect("build-finished", add_index)
