"""The patches of faults fit the tree. `python -m tests.mutants` runs the tests with each."""

import re

import pytest

from tests.mutants.__main__ import PATCHES, ROOT, apply, names


def test_there_are_faults_of_many_kinds():
    assert len(names()) >= 40


@pytest.mark.parametrize("name", names())
def test_a_patch_applies_and_changes_the_package_alone(name):
    apply(name, ROOT, check=True)
    text = (PATCHES / f"{name}.patch").read_text()
    changed = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
    assert len(changed) == 1
    assert changed[0].startswith("fedjax_mm/")
