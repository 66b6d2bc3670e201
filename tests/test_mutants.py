"""The mutants are patches that apply. `python -m tests.mutants` runs the tests with each."""

import re

from tests.mutants.__main__ import PATCHES, ROOT, BrokenError, apply, names


def test_there_are_many_mutants():
    assert len(names()) >= 40


def test_every_patch_applies_and_changes_only_the_package():
    wrong = []
    for name in names():
        text = (PATCHES / f"{name}.patch").read_text()
        changed = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
        try:
            apply(name, ROOT, check=True)
        except BrokenError as error:
            wrong.append(f"{name}: {error}")
        if len(changed) != 1 or not changed[0].startswith("fedjax_mm/"):
            wrong.append(f"{name}: changes {changed}")
    assert wrong == []
