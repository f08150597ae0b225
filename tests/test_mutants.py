"""The list of mutants fits the package and its tests: what it breaks is there, and so is what must notice."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import mutants
import pytest

TESTS = Path(__file__).parent
MUTANTS = mutants.read_list()


@functools.lru_cache
def ids_in(file: str) -> set[str]:
    """Return what pytest can be given of a file, but for parameters."""
    found = {file}
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{file}::{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef):
            found.add(f"{file}::{node.name}")
    return found


def test_every_mutant_changes_a_text_that_is_there_once():
    results = [(mutant.file, mutant.applied()) for mutant in MUTANTS]
    assert len(set(results)) == len(MUTANTS) >= 90
    assert not [str(mutant) for mutant in MUTANTS if mutant.new == mutant.old]


@pytest.mark.slow
def test_every_mutant_is_python():
    for mutant in MUTANTS:
        ast.parse(mutant.applied(), str(mutant))


def test_every_mutant_has_tests_that_are_there():
    assert not [str(mutant) for mutant in MUTANTS if not mutant.tests]
    named = {test for mutant in MUTANTS for test in mutant.tests}
    assert not {test for test in named if test not in ids_in(test.partition("::")[0])}


def test_every_file_has_mutants():
    files = {file.name for file in (TESTS.parent / "sync_batchnorm").glob("*.py")}
    assert files == {mutant.file for mutant in MUTANTS}


def test_text_that_is_gone_is_an_error_that_names_the_mutant():
    mutant = MUTANTS[0]._replace(old="no such text")
    with pytest.raises(ValueError, match=r"expected the text once, but got it 0 times \(.*'no such text' -> "):
        mutant.applied()
