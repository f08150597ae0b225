"""The page on troubleshooting quotes every message of the code, and none that the code does not have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def is_message(text: str) -> bool:
    """Tell whether `text` has the form of an error of this library, or is its warning; torch's words are not."""
    return (text.startswith("expected ") and ", but got " in text) or " trains in a replica " in text


def messages() -> dict[str, str]:
    """Return the messages in the code, as patterns, by where they are."""
    found = {}
    # Not the command, which explains its own arguments.
    files = set((ROOT / "sync_batchnorm").glob("*.py"))
    for file in sorted(files - {ROOT / "sync_batchnorm" / "__main__.py"}):
        parts: set[ast.AST] = set()  # of f-strings, which come before them
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.update(node.values)
                pieces = [value.value if isinstance(value, ast.Constant) else "\0" for value in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                pieces = [node.value]
            else:
                continue
            text = "".join(pieces)
            if is_message(text):
                pattern = re.escape(" ".join(text.split())).replace("\0", ".+")
                found[f"{file.stem}-{node.lineno}"] = pattern
    return found


MESSAGES = messages()


@pytest.mark.parametrize("where", MESSAGES)
def test_message_of_the_code_is_on_the_page(where):
    assert any(re.fullmatch(MESSAGES[where], quote) for quote in QUOTES), f"not quoted: {MESSAGES[where]}"


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:40])
def test_quote_on_the_page_is_in_the_code(quote):
    assert any(re.fullmatch(pattern, quote) for pattern in MESSAGES.values()), f"the code does not say: {quote}"


def test_there_are_messages_to_compare():
    assert len(MESSAGES) >= 20
    assert len(QUOTES) >= 20


def test_reasons_of_the_check_are_those_of_the_page():
    for line in re.findall(r"^  module\.\S+ \(\w+\): (.*)$", PAGE, re.MULTILINE):
        assert line in (ROOT / "sync_batchnorm" / "check.py").read_text()
