"""The mutants are changed programs, of every kind, and the same for the same code."""

import ast

import mutants

SOURCE = '''"""A text."""
class Box:
    def f(self, size: int = 10) -> int:
        if size < 2 and not self.full(
            size, 1
        ):
            return -size
        with self.lock:
            self.size = f"{size + 1}"
        raise ValueError("one" + text)
'''


def test_every_change_is_found_and_leaves_the_lines_where_they_are():
    found = list(mutants.mutants_of("box.py", SOURCE))
    assert len({mutant.change for mutant in found}) == len(found) == 16
    assert {"Box.f: `size < 2` -> `size <= 2`", "Box.f: `10` -> `11`"} < {mutant.change for mutant in found}
    assert {mutant.statement for mutant in found} == {"box.py:", *(f"box.py:{line}" for line in (4, 7, 8, 9, 10))}
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source.count("\n") == SOURCE.count("\n")


def test_package_has_mutants_that_are_the_same_each_time():
    assert mutants.all_mutants() == mutants.all_mutants() != []
