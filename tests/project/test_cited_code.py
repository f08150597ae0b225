"""Notes that the text of code and pages cites exist, once."""

from __future__ import annotations

import re
from collections import Counter

from repository import ROOT

PACKAGE = sorted((ROOT / "sync_batchnorm").rglob("*.py"))
TESTS = sorted(
    [*(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").glob("*.py"), *(ROOT / "docs").glob("*.py"), ROOT / "setup.py"]
)


def test_notes_that_are_cited_exist_once():
    notes, cited = Counter[str](), dict[str, str]()
    sources = [*PACKAGE, *TESTS, *(ROOT / "tests").rglob("*.h"), *(ROOT / "tests").rglob("*.cpp")]
    for path in [*sources, *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md"), ROOT / "README.md"]:
        text = re.sub(r"\n[ /#>]*", "\n", path.read_text(encoding="utf-8"))  # without what begins a line of a comment
        if path in sources:
            # A note begins a line with its name and a colon, or in C++ what it says.
            notes.update(re.findall(r"^NOTE \[([^]]+)\](?::|$|(?= [A-Z]))", text, re.MULTILINE))
        cited |= {" ".join(name.split()): path.name for name in re.findall(r"NOTE\s+\[([^]]+)\]", text)}
    assert len(cited) > 10
    assert not [f"{name}, in {file}" for name, file in cited.items() if notes[name] != 1]
