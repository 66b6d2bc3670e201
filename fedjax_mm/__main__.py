"""`python -m fedjax_mm` is the command `fedjax-mm`, even if that is not on the path."""

from fedjax_mm.interrupts import die_of_interrupts


def run() -> None:
    """Runs the program, which Ctrl-C ends without a traceback even during its imports."""
    die_of_interrupts()
    from fedjax_mm.cli import start

    start()


if __name__ == "__main__":
    run()
