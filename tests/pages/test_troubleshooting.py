"""The page on troubleshooting has an entry for each error of a running model, under words that the code says."""

from __future__ import annotations

import ast
import re

import pytest
from repository import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PHRASES = re.findall(r"^> (.+)$", PAGE, re.MULTILINE)
# The command and the check on one device say all of what they compare.
TOLD = [ROOT / "sync_batchnorm" / "__main__.py", *(ROOT / "sync_batchnorm" / "check").glob("*.py")]
# Who takes a text that a user reads. Errors of arguments say all, and need no entry.
TAKERS = ("RuntimeError", "ReplicaSyncError", "ReplicaTimeoutError", "warn_once", "self._break", "in_transform_error")
OF_ARGUMENTS = ("TypeError", "ValueError")


def words_of(node: ast.expr) -> str:
    """Return the text of a string of the code, with a gap for each field."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(piece.value if isinstance(piece, ast.Constant) else "\0" for piece in pieces)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def messages() -> dict[str, tuple[str, bool]]:
    """Return the messages in the code, and whether each needs an entry, by where they are."""
    by_place = {}
    for file in sorted((ROOT / "sync_batchnorm").rglob("*.py")):
        if file in TOLD:
            continue
        tree = ast.parse(file.read_text())
        # Constants are whole messages, or short reasons that a message lists.
        values = [node.value for node in tree.body if isinstance(node, ast.Assign) and is_text(node.value)]
        taken = [(value, True) for value in values if len(words_of(value).split()) > 20]
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in TAKERS + OF_ARGUMENTS:
                taken += [(arg, ast.unparse(call.func) in TAKERS) for arg in call.args]
        for node, needs_entry in taken:
            if is_text(node) and len(words_of(node).split()) > 8:
                by_place[f"{file.stem}-{node.lineno}"] = words_of(node), needs_entry
    return by_place


def begins(text: str, phrase: str) -> bool:
    """Return whether a message begins as an entry does, where "..." stands for names and numbers of the user."""
    if phrase.startswith("...") and not text.startswith("\0"):
        return False
    return re.match(".+?".join(map(re.escape, phrase.split("..."))), text, re.DOTALL) is not None


MESSAGES = messages()
OURS = [phrase for phrase in PHRASES if any(begins(text, phrase) for text, _ in MESSAGES.values())]


@pytest.mark.parametrize("where", [where for where, (_, needs_entry) in MESSAGES.items() if needs_entry])
def test_error_of_a_running_model_has_an_entry(where):
    assert any(begins(MESSAGES[where][0], phrase) for phrase in OURS), MESSAGES[where][0]


@pytest.mark.parametrize("phrase", OURS)
def test_words_of_an_entry_are_those_of_one_message(phrase):
    messages = [text for text, _ in MESSAGES.values() if begins(text, phrase)]
    assert len(messages) == 1, messages
    assert len(phrase.replace("...", "").split()) > 2


@pytest.mark.parametrize("phrase", [phrase for phrase in PHRASES if phrase not in OURS])
def test_entry_quotes_the_beginning_of_a_message_of_this_library_or_one_of_others(phrase):
    inside = [text for text, _ in MESSAGES.values() if all(part in text for part in phrase.split("..."))]
    assert not inside, f"begin the entry as this message begins, with ... for what differs: {inside}"


def test_there_are_messages_to_compare():
    assert len(MESSAGES) >= 40
    assert len(OURS) >= 25


def test_reasons_of_the_check_are_those_of_the_page():
    reasons = re.findall(r"^\| (\w.+?) \| ", PAGE, re.MULTILINE)[1:]
    assert len(reasons) >= 3
    for reason in reasons:
        assert reason in (ROOT / "sync_batchnorm" / "layers/assertion.py").read_text()


def causes_in_the_page() -> list[str]:
    """Return the words of the check on one device that the page on diagnosing has an entry for."""
    page = (ROOT / "docs" / "diagnosing.md").read_text()
    table = page.partition("| the message says |")[2].partition("\n\n")[0]
    return re.findall(r"^\| (.+?) \| ", table, re.MULTILINE)


def texts_of_explaining() -> list[str]:
    """Return what the check on one device may say of a difference."""
    folder = ROOT / "sync_batchnorm" / "check"
    files = ("explaining.py", "passes.py")
    tree = ast.parse("".join((folder / file).read_text() for file in files))
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    inside |= {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    texts = [words_of(node) for node in ast.walk(tree) if is_text(node) and id(node) not in inside]
    # Errors of arguments say all.
    return [text for text in texts if len(re.findall(r"\w+", text)) > 8 and not text.startswith("expected")]


@pytest.mark.parametrize("cause", causes_in_the_page())
def test_words_of_the_page_on_diagnosing_are_those_of_the_check(cause):
    code = "".join(path.read_text() for path in (ROOT / "sync_batchnorm" / "check").glob("*.py"))
    assert cause in re.sub(r'"\n *f?"', "", code)


@pytest.mark.parametrize("text", texts_of_explaining())
def test_what_the_check_says_has_an_entry_in_the_page_on_diagnosing(text):
    assert any(cause in text for cause in causes_in_the_page()), text
