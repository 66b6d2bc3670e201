"""Runs whose states of clients are in files, killed between and within rounds."""

import os
import re
import subprocess
import sys

KILLS = int(os.environ.get("FEDJAX_MM_KILLS", "3"))


def test_killed_runs_resume_to_the_bits_of_one_in_memory(tmp_path):
    command = [sys.executable, "-m", "tests_full.faults.client_files", tmp_path, str(KILLS)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kills, alike, ends = map(int, re.findall(r"\d+", said.splitlines()[-1]))
    assert kills >= KILLS
    assert alike == ends > 0
