"""Manifests describe the installed package."""

import subprocess
from importlib.metadata import PackageNotFoundError

from fedjax_mm.results import manifest as manifests
from fedjax_mm.results.manifest import manifest


def test_an_uninstalled_source_tree_has_no_version(monkeypatch):
    def version(package):
        if package == "fedjax-mm":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(manifests, "version", version)
    versions = manifest({}, seed=0, data="synthetic")["versions"]
    assert (versions["fedjax-mm"], versions["jax"]) == ("not installed", "1.0")


def test_the_revision_is_that_of_the_source_tree(monkeypatch, tmp_path):
    """It is None for an installed package, and marked if the tree differs from the revision."""

    def git(*arguments):
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def revision():
        return manifest({}, seed=0, data="real")["git_revision"]

    source = tmp_path / "fedjax_mm" / "results" / "manifest.py"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(manifests, "__file__", str(source))
    assert revision() is None

    git("init")
    git("add", ".")
    git("commit", "--message", "first")
    assert revision() == git("rev-parse", "HEAD")
    source.write_text("changed")
    assert revision() == git("rev-parse", "HEAD") + "-dirty"
