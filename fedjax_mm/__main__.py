"""`python -m fedjax_mm` is the command `fedjax-mm`, also where that is not on the path."""

from fedjax_mm.cli import start

if __name__ == "__main__":
    start()
