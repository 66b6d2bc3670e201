"""CelebA from its published files, with celebrities as clients and attributes as label columns."""

import difflib
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath

import numpy as np
from PIL import Image

from fedjax_mm.checks.annotations import Count, Fraction, checked
from fedjax_mm.data.federate import check_min_examples, federate, split_parts
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.partition import by_id, generator
from fedjax_mm.tools.files import located

_ATTRIBUTES = "list_attr_celeba.txt"
_IDENTITIES = "identity_CelebA.txt"
_IMAGES = "img_align_celeba"


@checked
def load_celeba(
    directory: str | Path,
    *,
    attributes: Sequence[str],
    image_size: Count = 84,
    min_images: Count = 5,
    num_clients: Count | None = None,
    balance: bool = False,
    test_fraction: Fraction = 0.1,
    seed: int = 0,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FederatedData:
    """Loads CelebA, with one client per celebrity with enough images.

    Labels are ``int32[examples, attributes]`` of 0 and 1, with one column for each of `attributes`,
    and C is 2. Images are uint8 RGB, resized to a square. Decoded images are kept in the directory
    `cache`.

    Args:
      directory: the directory with ``list_attr_celeba.txt``, ``identity_CelebA.txt`` and
        ``img_align_celeba/``.
      attributes: attribute names, such as ``["Smiling", "Eyeglasses"]``.
      image_size: the number of pixels per side.
      min_images: the minimum number of images per celebrity; celebrities with fewer are dropped.
      num_clients: the number of celebrities, drawn at random; defaults to all of them.
      balance: whether to drop random images of the larger class until both classes have the same
        number of images over all clients. This requires exactly one attribute.
      test_fraction: the fraction of each client's images for testing.
      seed: the seed for choosing clients and images, and for the split.
      cache: the directory for decoded images; defaults to ``decoded`` in `directory`.
      progress: called after each image with the number of decoded images and the total.

    Raises:
      FileNotFoundError: if a file or an image is missing.
      ValueError: if a row of a file is malformed, an attribute is unknown, an image is unreadable,
        or too few images or celebrities remain.

    Example:
      >>> load_celeba("celeba", attributes=["Smiling"])
      Traceback (most recent call last):
      FileNotFoundError: no list_attr_celeba.txt in celeba: give the folder of CelebA's own files

    Reference:
      Liu et al., "Deep learning face attributes in the wild", 2015; Caldas et al., "LEAF", 2018.
    """
    directory = Path(directory)
    check_min_examples("min_images", min_images)
    if balance and len(attributes) != 1:
        raise ValueError("balance needs exactly one attribute; load the attributes one by one")
    files, labels = _read_attributes(directory, attributes)
    owner = _read_identities(directory, files)
    rows = _select(labels, owner, min_images, num_clients, balance, generator(seed))
    paths = [directory / _IMAGES / files[row] for row in rows]
    x = _decoded(paths, image_size, Path(cache or directory / "decoded"), progress)
    pool = Pool("celeba", "real", 2, (x, labels[rows]), (x, labels[rows]))
    train, test = split_parts(by_id(owner[rows]), test_fraction=test_fraction, seed=seed)
    return federate(pool, train, test)


def check_celeba(directory: str | Path) -> None:
    """Raises `load_celeba`'s error if one of its text files is missing, without reading any.

    Example:
      >>> check_celeba("nowhere")
      Traceback (most recent call last):
      FileNotFoundError: no list_attr_celeba.txt in nowhere: give the folder of CelebA's own files
    """
    for name in (_ATTRIBUTES, _IDENTITIES):
        _find(Path(directory, name))


def _read_attributes(directory: Path, attributes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """File names, and the labels ``[images, attributes]`` of the given attributes."""
    if not attributes:
        raise ValueError("attributes is empty; name at least one")
    path = _find(directory / _ATTRIBUTES)
    with located(path), path.open(encoding="utf-8") as file:
        number, names = int(file.readline()), file.readline().split()
        columns = [names.index(_known(name, names)) for name in attributes]
        kind = [("file", object), ("values", np.float32, (len(names),))]
        images = np.loadtxt(file, kind, comments=None, ndmin=1)
        if len(images) != number:
            raise ValueError(f"line 1 declares {number} images, but there are {len(images)}")
        for name, row in images:
            if not (np.abs(row) == 1).all():
                raise ValueError(f"{name} has values other than 1 and -1")
            if PureWindowsPath(name).name != name:  # understands both kinds of slashes
                raise ValueError(f"{name!r} is a path; give a file's name")
    return images["file"].tolist(), (images["values"][:, columns] == 1).astype(np.int32)


def _known(name: str, names: list[str]) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    raise ValueError(f"attribute {name!r} is unknown; {hint}")


def _read_identities(directory: Path, files: list[str]) -> np.ndarray:
    path = _find(directory / _IDENTITIES)
    with located(path):
        kind = [("file", object), ("owner", np.uint64)]
        images = np.loadtxt(path, kind, comments=None, ndmin=1, encoding="utf-8")
        owners = dict(zip(images["file"], images["owner"], strict=True))
        if missing := [file for file in files if file not in owners]:
            raise ValueError(f"no line for {missing[0]}, which {_ATTRIBUTES} lists")
    return np.array([owners[file] for file in files])


def _find(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}: give the folder of CelebA's own files"
        )
    return path


def _select(
    labels: np.ndarray,
    owner: np.ndarray,
    min_images: int,
    num_clients: int | None,
    balance: bool,
    rng: np.random.Generator,
) -> np.ndarray:
    rows = _frequent(np.arange(len(owner)), owner, min_images)
    if balance:
        rows = _balanced(rows, labels[:, 0], owner, min_images, rng)
    clients = np.unique(owner[rows])
    if len(clients) < (num_clients or 1):
        raise ValueError(
            f"{len(clients)} celebrities have {min_images} images or more; "
            "lower num_clients or min_images"
        )
    if num_clients is None:
        return rows
    chosen = rng.permutation(clients)[:num_clients]
    rows = rows[np.isin(owner[rows], chosen)]
    return _thinned(rows, labels[:, 0], owner, min_images, rng) if balance else rows


def _frequent(rows: np.ndarray, owner: np.ndarray, min_images: int) -> np.ndarray:
    _, client, counts = np.unique(owner[rows], return_inverse=True, return_counts=True)
    return rows[counts[client] >= min_images]


def _balanced(
    rows: np.ndarray, y: np.ndarray, owner: np.ndarray, min_images: int, rng: np.random.Generator
) -> np.ndarray:
    # Repeat, because dropping celebrities with too few images changes the balance again.
    larger, surplus = _larger_class(y[rows])
    while surplus:
        rows = _frequent(np.delete(rows, rng.permutation(larger)[:surplus]), owner, min_images)
        larger, surplus = _larger_class(y[rows])
    return rows


def _thinned(
    rows: np.ndarray, y: np.ndarray, owner: np.ndarray, min_images: int, rng: np.random.Generator
) -> np.ndarray:
    """Drops images of the larger class without dropping any celebrity."""
    larger, surplus = _larger_class(y[rows])
    clients, counts = np.unique(owner[rows], return_counts=True)
    spare = dict(zip(clients.tolist(), (counts - min_images).tolist(), strict=True))
    dropped: list[int] = []
    for i in rng.permutation(larger):
        if len(dropped) < surplus and spare[owner[rows[i]]]:
            spare[owner[rows[i]]] -= 1
            dropped.append(i)
    if len(dropped) < surplus:
        raise ValueError(
            f"the chosen celebrities cannot be balanced with {min_images} images each; "
            "raise num_clients or lower min_images"
        )
    return np.delete(rows, dropped)


def _larger_class(y: np.ndarray) -> tuple[np.ndarray, int]:
    """Indices of the larger class and its surplus over the other class."""
    places = np.flatnonzero(y == (2 * y.sum() > len(y)))
    return places, 2 * len(places) - len(y)


def _decoded(
    paths: list[Path], image_size: int, cache: Path, progress: Callable[[int, int], None]
) -> np.ndarray:
    """Reads the images ``uint8[images, size, size, 3]``, from the cache if possible."""
    shape = (len(paths), image_size, image_size, 3)
    target = cache / f"images-{_digest(paths, image_size)}.npy"
    if target.is_file():
        try:
            images = np.load(target, allow_pickle=False)
        except (ValueError, EOFError):
            images = np.empty(0)  # the file is damaged, so decode again
        if images.shape == shape and images.dtype == np.uint8:
            return images
    cache.mkdir(parents=True, exist_ok=True)
    # Make a temporary folder before decoding, so that an unwritable cache fails now rather than
    # hours later. Write there and rename, so that the file is complete even if several processes
    # decode at once.
    with tempfile.TemporaryDirectory(dir=cache) as aside:
        images = np.empty(shape, np.uint8)
        for i, path in enumerate(paths):
            images[i] = _image(path, image_size)
            progress(i + 1, len(paths))
        np.save(Path(aside, target.name), images, allow_pickle=False)
        Path(aside, target.name).replace(target)
    return images


def _digest(paths: list[Path], image_size: int) -> str:
    # The key depends on the selected images, their order and size, and the image files.
    digest = hashlib.sha256(f"{image_size}\n".encode())
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no {path.name} in {path.parent}")
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _image(path: Path, image_size: int) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((image_size, image_size)))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: unreadable image: {error}") from error
