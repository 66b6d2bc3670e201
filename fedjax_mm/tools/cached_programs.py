"""JAX's on-disk cache, which replaces programs that it cannot load."""

from typing import Any

from jax._src.lru_cache import LRUCache


class Programs(LRUCache):
    """The compiled programs in one folder.

    JAX warns of a program that it cannot load and compiles it again, but `LRUCache` never replaces
    an existing file.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `LRUCache`."""
        super().__init__(*args, **options)
        self._read = set[str]()

    def get(self, key: str) -> bytes | None:
        """Reads a program, or returns None if it is not in the cache."""
        program = super().get(key)
        if program is not None:
            self._read.add(key)
        return program

    def put(self, key: str, value: bytes) -> None:
        """Writes a program unless it exists. JAX could not load a program that it has read."""
        if key in self._read:
            (self.path / f"{key}-cache").unlink(missing_ok=True)
        super().put(key, value)
