"""What points at code by its text points at something: notes, and names in backquotes.

`.ci/mutants.py` leaves this file out of its runs, since it compares texts.
"""

from __future__ import annotations

import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

PACKAGE = sorted((ROOT / "sync_batchnorm").rglob("*.py"))
TESTS = sorted(
    [*(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").glob("*.py"), *(ROOT / "docs").glob("*.py"), ROOT / "setup.py"]
)
PAGES = [ROOT / "docs" / name for name in ("contributing.md", "how-it-works.md")]
# Named in backquotes, though no code of the package has them: of Python and torch, of timm, of users, of formulas.
FOREIGN = {"UserWarning", "create_graph", "retain_graph", "lerp_", "dropout_p", "scaled_dot_product_attention"}
FOREIGN |= {"_flat_weights", "FakeTensorMode", "BatchNormAct2d", "NormAct", "N", "n_i", "dy_i", "dropout", "drop_prob"}


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


def tokens_of(paths: list[Path]) -> Iterator[tokenize.TokenInfo]:
    for path in paths:
        with path.open("rb") as file:
            yield from tokenize.tokenize(file.readline)


def test_names_in_backquotes_are_names_of_the_code():
    inside = list(tokens_of(PACKAGE))
    names = {token.string for token in inside if token.type == tokenize.NAME} | FOREIGN
    texts = [(token.string, names) for token in inside if token.type in (tokenize.STRING, tokenize.COMMENT)]
    names = names | {token.string for token in tokens_of(TESTS) if token.type == tokenize.NAME}
    texts += [(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), names) for page in PAGES]
    unknown = []
    for text, known in texts:
        # Not of torch, by its name, nor a file.
        for name in re.findall(r"(?<!`)`(?!torch\.|nn\.)([A-Za-z_][\w.]*)(?<!\.py)`(?!`)", text):
            unknown += [name] * (not known.issuperset(name.split(".")))
    assert len(texts) > 500
    assert not unknown, "mend the sentence that names this, or add a name that is not of the package to FOREIGN"
