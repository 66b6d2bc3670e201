"""More inputs for the rules of refusal in `tests/boundary`."""

import pytest

from tests.boundary.test_wrong import table_of
from tests.boundary.test_wrong import test_wrong_input_is_refused_in_one_line as refused
from tests_full.boundary import wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers

TABLE = table_of(wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers)


@pytest.mark.parametrize(("call", "words", "kind"), TABLE)
def test_more_wrong_input_is_refused_in_one_line(call, words, kind):
    refused(call, words, kind)
