"""Code of your own in files: functions that a file names as ``module:function``."""

import importlib
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedjax_mm.results.manifest import digest_of

_allows = ContextVar("allows_code", default=False)
_digests: dict[Path, str] = {}


def allows_code() -> bool:
    """Whether files that are read now may name code, which is then imported and called."""
    return _allows.get()


@contextmanager
def allowing_code(allow: bool) -> Iterator[None]:
    """Lets files that are read meanwhile name code, or forbids it."""
    token = _allows.set(allow)
    try:
        yield
    finally:
        _allows.reset(token)


def own_function(name: str) -> tuple[Callable[..., Any], str]:
    """Imports a function, whose errors become a `ValueError` with its name and line.

    Args:
      name: the function, as in ``"my_package.tasks:make"``.

    Returns:
      The function and the SHA-256 digest of its module's file.

    Raises:
      ValueError: if code is not allowed, the function cannot be imported, or its file has changed
        since this process imported it.
    """
    if not allows_code():
        raise ValueError(
            f"{name!r} is code, which is not run unless you allow it; read it, then give "
            "--allow-code, or in Python run(file, allow_code=True)"
        )
    module, _, path = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f'{name!r} names no function; write "module:function"')
    with _in_words(f"importing {name}", None):
        loaded = importlib.import_module(module)
        function = attrgetter(path)(loaded)
    file = Path(getattr(loaded, "__file__", None) or "")
    if not file.is_file():
        raise ValueError(f"{name!r} has no source file; name a function of a file of your own")
    digest = digest_of(file)
    if _digests.setdefault(file, digest) != digest:
        raise ValueError(f"{file} has changed since it was imported; start Python again")

    @wraps(function, updated=())  # which may be a class
    def call(*args: Any, **kwargs: Any) -> Any:
        with _in_words(name, file):
            return function(*args, **kwargs)

    return call, digest


@contextmanager
def _in_words(what: str, file: Path | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # code of users may raise any
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" ({x.filename}, line {x.lineno})" for x in frames if x.filename == str(file)]
        raise ValueError(
            f"{what} raised {type(error).__name__}: {error}{''.join(lines[-1:])}"
        ) from error
