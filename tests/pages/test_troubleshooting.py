"""The page on troubleshooting quotes every message of the code, and none that the code does not have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


REPLICA = r"replica \d+( on device \w+(:\d)?)?"
WAITING = rf"{REPLICA}( and {REPLICA})* waits?"
LAYER = r"[\w.]+"
EXCHANGE = rf"{LAYER}, call \d+"
STATE = r"which (is running|has not started|left its forward|was given no input|waits in [^;]+)"
NAMES = r"\['[\w.]+'(, '[\w.]+')*\]"
STRUCTURE = r"(None|Tensor|[({][\w(){}:', ]*[)}])"

LEFT = (
    rf"expected every replica to call {LAYER} equally often, but got {REPLICA}, {STATE}, while {WAITING} "
    rf"\({EXCHANGE}\); make every replica call every synchronized layer in every forward"
)

INPUT = r"\([\d, ]+\) of torch\.\w+"

# What each field of a message looks like, by the expression that fills it in.
FIELDS = {
    "', '.join(texts)": rf"{INPUT} \(eps=[^)]+\) in {REPLICA}(, {INPUT} \(eps=[^)]+\) in {REPLICA})+",
    "[member for member, _ in messages]": r"\[\d+(, \d+)*\]",
    "[str(device) for device in devices]": r"\['[\w:]+'(, '[\w:]+')*\]",
    "_missing": r"\['[\w.]+'\]",
    "__version__": r"\d+\.\d+\.\d+",
    "sorted(names)": NAMES,
    "', '.join(called)": r"[\w.]+ in rank \d+(, [\w.]+ in rank \d+)+",
    "which": r"([\w.]+|\d+ from '[\w.]+' on)",
    "whose": "(the wrapped module itself|no replica)",
    "compiled": NAMES,
    "dim": r"-?\d",
    "dist.get_rank()": r"\d+",
    "EPS_MODES": r"\('\w+', '\w+'\)",
    "group_size": r"-?\d+",
    "here.name": LAYER,
    "here.replica_id": r"\d+",
    "i": r"\d+",
    "input.dim()": r"\d",
    "kind.__name__": r"\w+",
    "late": rf"{REPLICA}, {STATE}( and {REPLICA}, {STATE})*",
    "layers": r"( module\.[\w.]+ \(\w+\): [^:]+)+",
    "len(plain)": r"\d+",
    "len(problems)": r"\d+",
    "len(replicas)": r"\d+",
    "len(same)": r"\d+",
    "list(answers)": r"\[\d+(, \d+)*\]",
    "most": r"\d+",
    "name or 'the module itself'": LAYER,
    "names[0] or 'the module'": LAYER,
    "numbers": r"\[\d+(, \d+)+\]",
    "our_name": r"\w+",
    "pipe.where": rf"{LAYER}, replica \d+",
    "places": rf"{REPLICA} in {EXCHANGE}(, {REPLICA} in {EXCHANGE})+",
    "plain_name": r"\w+",
    "process_group": r"<\w+>",
    "rendezvous": EXCHANGE,
    "rendezvous.name": LAYER,
    "self._left[replica_id]": STATE.removeprefix("which "),
    "self._wait_text(rendezvous)": WAITING,
    "self._waiting.get(replica_id, rendezvous)": EXCHANGE,
    "self.timeout": r"\d+",
    "self.who(replica_id)": REPLICA,
    "shapes": r"\[\([\d, ]+\)(, \([\d, ]+\))+\]",
    "structure": STRUCTURE,
    "structures[0]": STRUCTURE,
    "sys.executable": r"[\w/.]+",
    "sys.version.split()[0]": r"[\d.]+",
    "text": LEFT,
    "texts": rf"{INPUT} in {REPLICA}(, {INPUT} in {REPLICA})+",
    "threading.TIMEOUT_MAX": r"[\de.+]+",
    "timeout": r"\d+",
    "torch.__file__": r"[\w/.-]+",
    "torch.__version__": r"[\w.+]+",
    "what": r"\w+",
    "where": rf"{LAYER}, replica \d+",
    "who": REPLICA,
}


def field(value: ast.FormattedValue) -> str:
    """Return the pattern of a field; where there is none, what the page quotes cannot be compared with the code."""
    text = ast.unparse(value.value)
    if re.fullmatch(r"type\(\w+\)\.__name__", text):
        return r"\w+"
    if value.conversion == ord("r"):
        return r"('[^']*'|-?[\d.]+)"
    return f"({FIELDS[text]})"


def is_message(text: str) -> bool:
    """Return whether `text` has the form of an error or a warning of this library; torch's words are not."""
    return text.startswith("expected ") and ", but got " in text


def messages() -> dict[str, str]:
    """Return the messages in the code, as patterns, by where they are."""
    found = {}
    # Not the command, which explains its own arguments.
    files = set((ROOT / "sync_batchnorm").rglob("*.py"))
    for file in sorted(files - {ROOT / "sync_batchnorm" / "__main__.py"}):
        parts: set[ast.AST] = set()  # of f-strings, which come before them
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.update(node.values)
                pieces = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                pieces = [node]
            else:
                continue
            if is_message("".join(piece.value if isinstance(piece, ast.Constant) else "\0" for piece in pieces)):
                found[f"{file.stem}-{node.lineno}"] = "".join(
                    re.escape(re.sub(r"\s+", " ", piece.value)).replace(r"\{\}", rf"{LAYER}, replica \d+")
                    if isinstance(piece, ast.Constant)
                    else field(piece)
                    for piece in pieces
                )
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
