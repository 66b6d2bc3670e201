"""Programs that XLA compiles with the package's flags return the right numbers."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from fedjax_mm.tools.compiler import SAFE
from tests.compiling import USUAL
from tests.helpers import slow_unless
from tests.methods import METHODS
from tests_full.as_users import ASSIGNMENTS

FUSED = SAFE.replace("INDIVIDUAL_DOT", "DOT") + ",LIBRARY_FUSION_TYPE_REDUCE"
IS_WRONG = version("jaxlib") >= "0.10"  # with the fusions of FUSED

# Pairs whose first round reads losses at zero, and one pair of each other kind.
QUICK = {("fedavg", "lvr"), ("scaffold", "lvr"), ("fedavg", "mfa_rr"), ("maxfl", "fedfair")}
PAIRS = [(method, assignment) for method in METHODS for assignment in ASSIGNMENTS]


def run(code, flags="", **environment):
    """Runs Python in a process that compiles as users do, and returns its stdout and stderr."""
    env = os.environ | USUAL | {"XLA_FLAGS": flags} | environment
    command = [sys.executable, *code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def numbers(pairs, flags=""):
    names = ["/".join(pair) for pair in pairs]
    return json.loads(run(["-m", "tests_full.as_users", *names], flags)[0].splitlines()[-1])


def test_2000_vmapped_seeds_equal_single_runs():
    found = numbers(sorted(QUICK))
    assert found["canary"]
    assert set(found["seeds"].values()) == {0}
    assert found["programs"] == []


@pytest.mark.parametrize("method", [slow_unless(False, name) for name in METHODS])
def test_2000_vmapped_seeds_of_each_method_and_assignment(method):
    needs_factors = method.startswith("stalevr")
    fitting = [name for name in ASSIGNMENTS if not needs_factors or "vr" in name]
    found = numbers((method, name) for name in fitting)["seeds"]
    assert {pair: wrong for pair, wrong in found.items() if wrong != 0} == {}


@pytest.mark.skipif(not IS_WRONG, reason="jaxlib 0.9 has no such fusions")
def test_the_canary_detects_wrong_fusions():
    assert not numbers([], FUSED)["canary"]


START = """
import os, sys
if "late" in sys.argv:
    import jax
    jax.devices()
import fedjax_mm
if "replaced" in sys.argv:  # as tutorials of JAX do for several CPU devices
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
if "removed" in sys.argv:
    del os.environ["XLA_FLAGS"]
from fedjax_mm.tasks import quadratic
from fedjax_mm.tools.compiler import canary
task = quadratic(4, 2, mu=0.1)
fedjax_mm.init(0, task, fedjax_mm.fedavg(0.1, local_steps=1), fedjax_mm.full_participation(4))
print(canary(), os.environ.get("XLA_FLAGS"))
"""


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", SAFE),
        ("--xla_dump_to=", f"{SAFE} --xla_dump_to="),
        (f"{FUSED} {SAFE}", f"{FUSED} {SAFE}"),  # XLA takes the last one
    ],
)
def test_the_flag_is_set_unless_the_user_sets_it(given, flags):
    output, errors = run(["-c", START], given)
    assert output.split() == ["True", *flags.split()]
    assert "XLA returns wrong" not in errors


WRONG = [
    (["late"], ""),
    (["replaced"], ""),
    (["removed"], ""),
    ([], FUSED),
    ([], f"{SAFE} {FUSED}"),
]


@pytest.mark.skipif(not IS_WRONG, reason="jaxlib 0.9 has no such fusions")
@pytest.mark.parametrize(("arguments", "flags"), WRONG)
def test_a_process_that_computes_wrong_numbers_warns(arguments, flags):
    output, errors = run(["-c", START, *arguments], flags)
    assert output.startswith("False")
    assert "XLA returns wrong numbers in this process" in errors
