"""Run the tests with each Python and torch that `setup.py` claims: ``nox``, or ``nox -k oldest -- tests/layers``."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
TORCH = {
    "oldest": "torch==2.8.0 torchvision==0.23.0",
    "pinned": "torch==2.13.0 torchvision==0.28.0",
    "newest": "torch torchvision",
}
PAIRS = [("3.11", "oldest"), ("3.11", "newest"), *((python, "pinned") for python in ("3.11", "3.12", "3.13", "3.14"))]


@nox.session
@nox.parametrize(("python", "torch"), PAIRS, ids=[f"{python} {torch}" for python, torch in PAIRS])
def tests(session: nox.Session, torch: str) -> None:
    """Run the quick tests, or what the arguments after ``--`` ask for."""
    overrides = Path(session.create_tmp(), "overrides.txt")  # of the pins of setup.py
    overrides.write_text("\n".join([*TORCH[torch].split(), "setuptools<82"]))  # Some torch takes no newer setuptools.
    session.install("--override", str(overrides), "pip", "--editable", ".[test]")
    session.run("python", "-m", "pytest", "-rs", *session.posargs)
