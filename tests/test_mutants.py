"""The mutants are patches that apply. `python -m tests.mutants` runs the tests with each."""

import re

import pytest

from tests.mutants.__main__ import PATCHES, ROOT, apply, names


def test_there_are_many_mutants():
    assert len(names()) >= 40


@pytest.mark.parametrize("name", names())
def test_a_patch_applies_and_changes_only_the_package(name):
    apply(name, ROOT, check=True)
    text = (PATCHES / f"{name}.patch").read_text()
    changed = re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)
    assert len(changed) == 1
    assert changed[0].startswith("fedjax_mm/")
