"""Ctrl-C ends the block, which tidies up, even if a library swallows the exception."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from fedjax_mm.tools.interrupts import noted_signals, tidy_interrupts


@pytest.fixture(autouse=True)
def usual():
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@tidy_interrupts()
def into_another_error():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ImportError("Encountered an error while initializing the extension") from error


@tidy_interrupts()
def cleared():
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("wait", [into_another_error, cleared])
def test_an_interrupt_ends_the_block_even_if_swallowed(wait, capsys):
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == ""


def test_an_early_interrupt_ends_the_program_silently():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import fedjax_mm.__main__ as program, fedjax_mm.cli as cli\n"
        "cli.start = lambda: signal.raise_signal(signal.SIGINT)\n"
        "program.run()"
    )
    done = child(code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_second_signal_kills_the_process():
    """This holds even if a callback swallowed the first one, which Python reports."""
    code = (
        "import signal; from fedjax_mm.tools.interrupts import noted_signals, tidy_interrupts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Dying:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "with tidy_interrupts():\n"
        "    try:\n"
        "        dying = Dying(); del dying\n"
        "        print('goes on', flush=True)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        print('tidied', flush=True)"
    )
    done = child(code)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "goes on\n")
    assert "Exception ignored" in done.stderr


@pytest.mark.parametrize("is_ignored", [False, True])
def test_sigterm_tidies_up_and_ends_the_process(is_ignored):
    """This holds in the background, too, where Ctrl-C is ignored."""
    code = (
        "import signal, sys\n"
        "from fedjax_mm.tools.interrupts import noted_signals, tidy_interrupts\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if is_ignored else 'default_int_handler'})"
        "\nwith tidy_interrupts():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        print('tidied', flush=True)\n"
        "print('goes on')"
    )
    done = child(code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "tidied\n", "")


@pytest.mark.parametrize(
    ("block", "ends"),
    [("tidy_interrupts()", (-signal.SIGTERM, "tidied")), ("noted_signals(True, '')", (0, "saved"))],
)
def test_a_signal_sent_twice_at_once_counts_once(block, ends):
    """`timeout` signals both the process and its process group."""
    code = (
        "import time; from fedjax_mm.tools import interrupts; interrupts._TOGETHER = 2\n"
        "from fedjax_mm.tools.interrupts import noted_signals, tidy_interrupts\n"
        f"with {block} as noted:\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        for _ in range(100):\n"
        "            time.sleep(0.05)\n"
        "            if noted: break\n"
        "    finally:\n"
        "        print('saved' if noted else 'tidied', flush=True)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        time.sleep(0.03)
        os.killpg(process.pid, signal.SIGTERM)
        said = process.stdout.read().strip()
    assert (process.returncode, said) == ends


def test_a_signal_during_a_write_to_stderr_is_noted(monkeypatch):
    read, write = os.pipe()

    class Interrupted(io.FileIO):
        def write(self, content):
            if not noted:
                signal.raise_signal(signal.SIGTERM)
            return super().write(content)

    stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted(write, "w")))
    monkeypatch.setattr(sys, "stderr", stderr)
    with noted_signals(True, "saving") as noted:
        print("progress", file=sys.stderr, flush=True)
    stderr.close()
    assert noted == [signal.SIGTERM]
    with os.fdopen(read) as said:
        assert said.read() == "\nsaving; once more stops at once\nprogress\n"
