"""The recipes of docs/frameworks.md, run with the real frameworks: each trains to the numbers of one device.

Needs the extra `frameworks`; a test skips where its framework is not installed.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from test_docs import blocks_of, section_of

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"

pytestmark = pytest.mark.watchdog(120.0)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """Run the Python blocks of a section of the page as one module, in an empty folder, and return the module.

    The test names the section and what has to be installed: ``@pytest.mark.parametrize("recipe", [("fastai",
    "fastai")], indirect=True)``.
    """
    heading, package = request.param
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"recipe_of_{package}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes that a page defines can be pickled
    for block in blocks_of(PAGE):
        if block.language == "python" and section_of(PAGE, block) == heading:
            exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), module.__dict__)
    return module
