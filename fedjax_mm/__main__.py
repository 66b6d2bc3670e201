"""`python -m fedjax_mm` is the command `fedjax-mm`, also where that is not on the path."""

from fedjax_mm.interrupts import die_of_interrupts


def run() -> None:
    """The program; Ctrl-C while it is imported ends it without a word."""
    die_of_interrupts()
    from fedjax_mm.cli import start

    start()


if __name__ == "__main__":
    run()
