"""`python -m fedjax_mm` runs the command `fedjax-mm` even if it is not on the PATH."""

from fedjax_mm.tools.interrupts import die_of_interrupts


def run() -> None:
    """Runs the program such that Ctrl-C ends it without a traceback, even during imports."""
    die_of_interrupts()
    from fedjax_mm.cli import start

    start()


if __name__ == "__main__":
    run()
