"""Makes the description that a package index shows, of README.md; all else is in pyproject.toml.

An index has no file beside the README. Links to files are therefore text there, and pictures of
the repository are left out; links with an address stay.
"""

import re
from pathlib import Path

FILE = r"(?!https?:)[^)\s\"]+"
PICTURE = re.compile(rf"<picture>.*?</picture>|<img src=\"{FILE}\"[^>]*>|!\[[^]]*\]\({FILE}\)")
LINK = re.compile(rf"\[([^]]*)\]\(({FILE})\)")


def description(readme: str) -> str:
    """Returns the README for somebody who has no other file."""
    return LINK.sub(r"\1 (`\2`)", PICTURE.sub("", readme))


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
