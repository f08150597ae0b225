"""The mutants are what they should be: changed programs, of every kind, the same for the same seed."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import textwrap
from collections import Counter
from pathlib import Path

import line_record
import mutants
import mutation
import pytest

SOURCE = '''
"""A text."""

from threading import Lock

__all__ = ["f"]
LIMIT = 10


class Box:
    def f(self, size: int, text: str = "1") -> int:
        """Return 1 + 1."""
        # A comment: 1 < 2
        if size < LIMIT and not self.full(
            text, size
        ):
            return -size
        with self.lock:
            self.size = f"{size + 1}"
        raise ValueError("one" + text)
'''
SOURCES = mutants.sources()
FOUND = mutation.mutants_of({"box.py": SOURCE})


@pytest.fixture(scope="module")
def all_mutants():
    return mutation.mutants_of(SOURCES)


def test_every_change_is_found_and_named():
    condition = "`if size < LIMIT and not self.full( text, size ):` -> "
    lock = '`with __import__("contextlib").nullcontext():`'
    assert [(mutant.kind, mutant.function, mutant.change) for mutant in FOUND] == [
        ("constant", "module", "`LIMIT = 10` -> `LIMIT = 11`"),
        ("condition", "Box.f", f"{condition}`if (True ):`"),
        ("condition", "Box.f", f"{condition}`if (False ):`"),
        ("condition", "Box.f", "`if size < LIMIT and not self.full(` -> `if size < LIMIT or not self.full(`"),
        ("condition", "Box.f", "`if size < LIMIT and not self.full(` -> `if True and not self.full(`"),
        ("condition", "Box.f", f"{condition}`if size < LIMIT and (True ):`"),
        ("comparison", "Box.f", "`if size < LIMIT and not self.full(` -> `if size <= LIMIT and not self.full(`"),
        ("condition", "Box.f", "`if size < LIMIT and not self.full(` -> `if size < LIMIT and self.full(`"),
        ("exchanged arguments", "Box.f", "`text, size` -> `size, text`"),
        ("dropped statement", "Box.f", "`return -size` -> `pass`"),
        ("arithmetic", "Box.f", "`return -size` -> `return size`"),
        ("dropped statement", "Box.f", f"`with self.lock:` -> {lock}"),
        ("dropped statement", "Box.f", '`self.size = f"{size + 1}"` -> `pass`'),
        ("dropped statement", "Box.f", '`raise ValueError("one" + text)` -> `pass`'),
    ]


def test_change_leaves_everything_else_where_it_is():
    for mutant in FOUND:
        before, after = SOURCE.splitlines(), mutant.applied(SOURCE).splitlines()
        assert len(before) == len(after)
        assert before[: mutant.line - 1] == after[: mutant.line - 1]


def test_same_words_twice_in_a_function_are_counted():
    source = "def f(x):\n    x += 1\n    x += 1\n    return x\n"
    changes = [mutant.change for mutant in mutation.mutants_of({"f.py": source})]
    assert changes[:2] == ["`x += 1` -> `x -= 1`", "`x += 1` -> `pass`"]
    assert [change.endswith(" #2") for change in changes] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("source", "reached"),
    [
        ("def f(x):\n    return x + 1\n", ["a.py:2"]),
        ("def f(x=1):\n    y = x\n    return y\n", ["a.py:1", "a.py:2", "a.py:3"]),
        ("LIMIT = 1\n\ndef f(x):\n    return x\n\ndef g(x):\n    return x.LIMIT\n", ["a.py:1", "a.py:7"]),
        ("if f(1):\n    LIMIT = 2\n", ["a.py:1"]),
    ],
    ids=["statement", "default", "constant", "import"],
)
def test_change_is_reached_where_it_has_an_effect(source, reached):
    constant = next(mutant for mutant in mutation.mutants_of({"a.py": source}) if mutant.kind == "constant")
    assert constant.reached == set(reached)


def test_name_that_another_file_uses_is_reached_there():
    found = mutation.mutants_of({"a.py": "LIMIT = 1\n", "b.py": "import a\n\ndef f():\n    print(a.LIMIT)\n"})
    assert found[0].reached == {"a.py:1", "b.py:4"}


def test_every_file_of_the_package_has_mutants_of_every_kind_together(all_mutants):
    assert {mutant.file for mutant in all_mutants} == {*SOURCES} - {"batchnorm.py"}  # which has imports alone
    kinds = Counter(mutant.kind for mutant in all_mutants)
    assert {*kinds} == {*mutation.KINDS}
    assert min(kinds.values()) >= 50


def test_same_code_has_the_same_mutants():
    source = {"coordinator.py": SOURCES["coordinator.py"]}
    assert mutation.mutants_of(source) == mutation.mutants_of(source)


def test_every_mutant_has_a_name_and_a_text_of_its_own(all_mutants):
    assert len({str(mutant) for mutant in all_mutants}) == len(all_mutants)
    texts = {(mutant.file, mutant.applied(SOURCES[mutant.file])) for mutant in all_mutants}
    assert len(texts) == len(all_mutants)
    assert not texts & {*SOURCES.items()}


def test_mutants_of_a_sample_are_python_and_the_same_for_the_same_seed(all_mutants):
    chosen = mutants.sample(all_mutants, 60, seed=1)
    assert len({*chosen}) == 60
    for mutant in chosen:
        ast.parse(mutant.applied(SOURCES[mutant.file]), str(mutant))
    assert chosen == mutants.sample(all_mutants, 60, seed=1)
    assert chosen != mutants.sample(all_mutants, 60, seed=2)


@pytest.mark.slow
@pytest.mark.watchdog(180)
def test_every_mutant_is_python(all_mutants):
    for mutant in all_mutants:
        ast.parse(mutant.applied(SOURCES[mutant.file]), str(mutant))


def test_every_equivalent_is_still_there_and_has_a_reason(all_mutants):
    assert not [equivalent for equivalent in mutants.EQUIVALENT if not any(m in equivalent for m in all_mutants)]
    assert all(equivalent.reason.endswith(".") for equivalent in mutants.EQUIVALENT)


def test_quick_tests_come_first_and_one_of_each_function_before_the_next():
    times = {"t::a[1]": 2.0, "t::a[2]": 1.0, "t::b": 3.0, "t::c": 0.5, "t::failed": 0.1}
    tests = {
        test: {"seconds": seconds, "passed": test != "t::failed", "statements": ["a.py:2"]}
        for test, seconds in times.items()
    }
    tests["t::other"] = {"seconds": 0.1, "passed": True, "statements": ["a.py:3"]}
    mutant = FOUND[0]._replace(reached=frozenset({"a.py:1", "a.py:2"}))
    assert mutants.tests_of(mutant, tests) == ["t::c", "t::a[2]", "t::b", "t::a[1]"]


@pytest.mark.parametrize("file", ["backends/cpu.py", "backends/__init__.py", "backends.py"])
def test_tests_of_the_file_or_its_subpackage_come_first(file):
    others = [f"tests/test_{number}.py::test[{case}]" for number in range(mutants.FILES) for case in range(2)]
    names = [*others, "tests/test_backends.py::test"]
    tests = {name: {"seconds": 0.1, "shared": []} for name in names}
    assert names[-1] in mutants.first_of(names, file, tests)
    assert names[-1] not in mutants.first_of(names, "places.py", tests)


def test_every_file_of_the_package_is_recorded_also_in_subpackages(tmp_path):
    for file in ("a.py", "inner/a.py"):
        path = tmp_path / "sync_batchnorm" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
    line_record.prepare(tmp_path)
    for file in ("a.py", "inner/a.py"):
        compiled = importlib.util.cache_from_source(str(tmp_path / "sync_batchnorm" / file))
        assert f"{file}:1".encode() in Path(compiled).read_bytes()
    assert {"autograd.py", "backends/__init__.py", "backends/cpu.py"} <= {*SOURCES}


@pytest.mark.parametrize(("budget", "number"), [(0.5, 1), (1.0, 1), (2.5, 2), (4.0, 3)])
def test_tests_over_the_budget_are_left_out_but_for_the_first(budget, number):
    tests = {name: {"seconds": 1.0, "shared": []} for name in "abc"}
    assert mutants.within_budget("abc", tests, budget) == number


def test_shared_fixture_is_paid_once():
    tests = {name: {"seconds": 1.0, "shared": ["world"]} for name in "abc"}
    tests |= {"d": {"seconds": 1.0, "shared": ["world", "other"]}}
    assert mutants.within_budget("abcd", tests, 1.5) == 3
    assert mutants.within_budget("abcd", tests, 2.5) == 4


def test_recorded_bytecode_notes_each_statement_and_keeps_its_line():
    source = textwrap.dedent('''\
        """A text."""
        from __future__ import annotations

        def f(x):
            """Return 1."""
            if x:
                return 1
            raise ValueError("wrong")
        ''')
    tree = line_record.noting(ast.parse(source), "a.py")
    ran = []
    names = {"__ran__": ran.append}
    exec(compile(tree, "a.py", "exec"), names)
    assert names["f"](1) == 1
    with pytest.raises(ValueError, match="wrong") as caught:
        names["f"](0)
    assert ran == [*(f"a.py:{line}" for line in (4, 6, 7, 6, 8))]
    assert [entry.lineno for entry in caught.traceback][-1] == 7  # counted from zero
    assert names["__doc__"] == "A text."
    assert names["f"].__doc__ == "Return 1."


def test_recording_gives_what_a_fixture_has_run_to_all_its_tests(tmp_path):
    entries = [
        '[]\n"a.py:1"\n["t::a", "t: world"]\n"a.py:2"',
        '{"test": "t::a", "seconds": 9.0, "shared": ["t: world"], "passed": true}\n["t::b"]\n"a.py:3"',
        '{"test": "t::b", "seconds": 1.0, "shared": ["t: world"], "passed": true}',
        '{"test": "t::c", "seconds": 1.0, "shared": [], "passed": false}',
    ]
    (tmp_path / "recorded").mkdir()
    for entry, number in zip(entries, itertools.count()):
        (tmp_path / "recorded" / f"{number}.jsonl").write_text(entry)
    found = line_record.collect(tmp_path)
    statements = {test: found[test]["statements"] for test in found}
    assert statements == {"t::a": ["a.py:2"], "t::b": ["a.py:2", "a.py:3"], "t::c": []}
    assert {test: found[test]["seconds"] for test in found} == {"t::a": 9.0, "t::b": 9.0, "t::c": 1.0}
    assert [test for test in found if not found[test]["passed"]] == ["t::c"]
