"""The devices that JAX sees on this machine, and the cache of compiled programs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from fedjax_mm.cli.terminal import notes, say, show_table
from fedjax_mm.sweeps.devices import missing_plugin
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.tools.cache import Loading, clear, kept_programs, rejection
from fedjax_mm.tools.compiler import OFF, cache_directory


def show_devices(place: Path | None) -> None:
    """Prints the devices and the path of the cache."""
    kinds = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
    say(f"devices: {kinds}\ncompilation cache: {place or OFF}", notes)


def tell_of_accelerators() -> None:
    """Explains how to use this machine's accelerator if JAX does not see it."""
    if extra := missing_plugin():
        say(
            "this machine has an accelerator that JAX does not see; install its plugin: "
            f"pip install 'fedjax-mm[{extra}]' (or set JAX_PLATFORMS=cpu)",
            notes,
        )


def show_cache(is_cleared: bool) -> None:
    """Prints the cached programs of each version and platform, and removes them on request."""
    place = cache_directory()
    with refusing():
        if place is None:
            raise ValueError(f"FEDJAX_MM_CACHE is {OFF}; no compiled programs are kept")
        kept = kept_programs(place)
        rows = [(x.folder.name, f"{x.programs:,}", f"{x.num_bytes / 2**20:,.0f}") for x in kept]
        if is_cleared:
            for each in kept:
                clear(each)
    show_table(("version", "programs", "MiB"), rows, box=None, title=str(place))
    if is_cleared:
        say("removed; programs are compiled again at their next start")


@contextmanager
def watched() -> Iterator[None]:
    """Reports cached programs that fail to load and, at the end, whether loading saved no time."""
    loading, show_warning, is_told = Loading(), warnings.showwarning, False

    def tell(message: Warning | str, *args: Any, **options: Any) -> None:
        nonlocal is_told
        reason = rejection(str(message))
        if reason is None:
            show_warning(message, *args, **options)
        elif not is_told:
            is_told = True
            what = next(iter(reason.splitlines()), "")
            say(
                f"compiled programs in {cache_directory()} cannot be loaded ({what:.80}); they are "
                "compiled again and replaced",
                notes,
            )

    warnings.showwarning = tell
    jax.monitoring.register_event_duration_secs_listener(loading.listen)
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        jax.monitoring.unregister_event_duration_listener(loading.listen)
    if loading.is_vain:
        say(
            f"compiled programs took {loading.loaded:.0f} s to load from {cache_directory()} and "
            f"{loading.compiled:.0f} s to compile: this processor seems to reject them; "
            "`fedjax-mm --no-cache` keeps none",
            notes,
        )
