"""The messages that pages quote or filter are those of the package, or known ones of PyTorch and Python."""

from __future__ import annotations

import ast
import copy
import re
import runpy
import types
from collections.abc import Iterator

import pytest
import torch
from repository import PACKAGE, ROOT, blocks_of

PAGE = ROOT / "docs" / "troubleshooting.md"
PHRASES = re.findall(r"^> (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
OF_OTHERS = {
    "you can only change requires_grad flags of leaf variables",
    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol",
    "The stateless API can't be used with nn.DataParallel module",
    "appears to not have been used in the graph",
    "Failed to export the model",
    "Error inferring type for _sync_layer",
    "did not find fuser method for",
    "symbolically traced variables cannot be used as inputs to control flow",
    "cannot import name 'DataParallelWithCallback' from 'sync_batchnorm' (unknown location)",
    "terminate called without an active exception",
}


def words_of(node: ast.expr) -> str:
    """Return a string of the code, with a gap for each field."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(piece.value) if isinstance(piece, ast.Constant) else "\0" for piece in pieces)


def texts() -> Iterator[str]:
    """Yield the strings of the package, but for docstrings and pieces of f-strings."""
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        inside |= {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
        for node in ast.walk(tree):
            is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if (is_string or isinstance(node, ast.JoinedStr)) and id(node) not in inside:
                yield words_of(node)


TEXTS = list(texts())


def begins(text: str, phrase: str) -> bool:
    """Return whether a message begins as an entry does, where "..." stands for names and numbers."""
    if phrase.startswith("...") and not text.startswith("\0"):
        return False
    return re.match(".+?".join(map(re.escape, phrase.split("..."))), text, re.DOTALL) is not None


@pytest.mark.parametrize("phrase", PHRASES)
def test_message_that_the_page_quotes_exists_once_in_the_package_or_is_known_to_be_of_others(phrase):
    found = [text for text in TEXTS if begins(text, phrase)]
    assert len(found) == (phrase not in OF_OTHERS), found


def test_each_filter_of_the_page_hides_one_kind_of_warning():
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    patterns = re.findall(r'`r?"(.+?)"`', page.partition("## Warnings to filter")[2].partition("\n## ")[0])
    hidden = [{text for text in TEXTS if re.match(pattern, text.replace("\0", "1"))} for pattern in patterns]
    numbers = {pattern: len(texts) for pattern, texts in zip(patterns, hidden, strict=True)}
    assert numbers == dict.fromkeys(patterns, 1) | {"convert_model left": 2}  # of layers, and of options
    assert len(set().union(*hidden)) == sum(numbers.values()) > 8


def test_example_of_a_difference_prints_the_message_below_it(tmp_path, capsys):
    blocks = list(blocks_of(ROOT / "docs" / "diagnosing.md"))
    (at,) = [i for i, block in enumerate(blocks) if "class Center" in block.code]
    program = tmp_path / "train.py"
    program.write_text(blocks[at].code, encoding="utf-8")
    runpy.run_path(str(program))
    printed, shown = (
        re.sub(r"by [\d.]+ of", "by ... of", " ".join(text.split()))
        for text in (capsys.readouterr().out, blocks[at + 1].code)
    )
    assert printed == shown


def test_wrapper_with_the_attributes_of_the_model_is_copied_as_a_wrapper():
    page = types.ModuleType("page")
    for block in blocks_of(PAGE):
        if block.language == "python" and not hasattr(page, "Transparent"):
            block.run(vars(page))
    graph = torch.fx.symbolic_trace(torch.nn.Linear(3, 4))  # whose class has a `__deepcopy__`
    wrapper = page.Transparent(graph, ["cpu"] * 2)
    copied = copy.deepcopy(wrapper)
    assert type(copied) is page.Transparent
    assert torch.equal(copied.weight, wrapper.weight)
    assert copied.weight is not wrapper.weight
