"""Makes the description and the addresses for a package index; the rest is in pyproject.toml.

An index has no file beside the README. Links to files are therefore text there, and pictures of
the repository are left out; links with an address stay.
"""

import os
import re
from pathlib import Path

FILE = r"(?!https?:)[^)\s\"]+"
PICTURE = re.compile(rf"<picture>.*?</picture>|<img src=\"{FILE}\"[^>]*>|!\[[^]]*\]\({FILE}\)")
LINK = re.compile(rf"\[([^]]*)\]\(({FILE})\)")


def description(readme: str) -> str:
    """Returns the README for somebody who has no other file."""
    return LINK.sub(r"\1 (`\2`)", PICTURE.sub("", readme))


def addresses() -> dict[str, str]:
    """Returns the addresses of the project, from the variables that mkdocs.yml reads, too."""
    repository, site = os.environ.get("REPO_URL", ""), os.environ.get("SITE_URL", "")
    found = {"Documentation": site, "Source": repository}
    if repository:
        found["Issues"] = f"{repository}/issues"
        found["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
    return {name: address for name, address in found.items() if address}


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme),
        long_description_content_type="text/markdown",
        project_urls=addresses(),
    )
