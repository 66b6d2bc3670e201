"""Sentiment140, with Twitter users as clients and mean word vectors of tweets as examples."""

import csv
import html
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32

from fedjax_mm.checks.annotations import Count, Fraction, checked
from fedjax_mm.data.federate import check_min_examples, federate, split_parts
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.leaf import json_files, read_users
from fedjax_mm.data.partition import consecutive, generator
from fedjax_mm.tools.files import check_regular

_CSV = "training.1600000.processed.noemoticon.csv"
_COLUMNS = "polarity, id, date, query, user, text"
_LABELS = {"0": 0, "2": None, "4": 1}
_END = "\uffff"  # not in latin-1; marks a record cut off by the end of the file
_TEXT = 4  # position of the text in LEAF's rows, which begin with the id
_TOKEN = re.compile(
    r"(?P<url>(?:https?://|www\.)\S+)"
    r"|(?P<user>@\w+)"
    r"|\#(?P<hashtag>\w+)"
    r"|(?P<number>\d+(?:[.,:]\d+)*(?!\w))"
    r"|(?P<word>\w+(?:'\w+)*)"
    r"|(?P<mark>[^\w\s])(?P<again>(?P=mark)*)"
)
_BUCKETS = 2**15  # number of vectors for hashed words
_HASHED_SEED = 140


@checked
def load_sent140(
    directory: str | Path,
    *,
    num_clients: Count | None = None,
    min_examples: Count = 50,
    test_fraction: Fraction = 0.4,
    dim: Count = 200,
    glove: str | Path | None = None,
    seed: int = 0,
) -> FederatedData:
    r"""Loads Sentiment140, with one client per Twitter user with enough tweets.

    Labels are 1 for positive tweets and 0 for negative ones. Features, ``float32[examples, dim]``,
    are the mean word vector of a tweet, or zeros if no word has a vector. Tweets are split into
    words by `fedjax_mm.data.sent140.tokenize`. Without GloVe vectors, a word's hash selects one of
    32,768 fixed Gaussian vectors; the dataset is then a surrogate named "sent140, hashed words".

    Args:
      directory: a directory with the official ``training.1600000.processed.noemoticon.csv``, whose
        neutral tweets are dropped, or with LEAF's JSON files of tweets, either directly or in
        ``train`` and ``test``, which are joined. (LEAF counts neutral tweets as negative.)
      num_clients: the number of users, drawn at random. A larger number keeps the users of a
        smaller one and adds others. Defaults to all users, sorted by name.
      min_examples: the minimum number of tweets per user; users with fewer are dropped.
      test_fraction: the fraction of each client's tweets for testing, drawn at random.
      dim: d, the length of a word's vector.
      glove: a GloVe text file, such as ``glove.twitter.27B.200d.txt``, with a word and d numbers
        per line. Defaults to the ``glove*.txt`` in `directory` that has d numbers per
        line, if any.
      seed: the seed for choosing users and for the split.

    Raises:
      FileNotFoundError: if the tweet files are missing, or `glove` does not exist.
      ValueError: if a row of a file is malformed, a vector does not have d finite numbers, the
        GloVe files in `directory` do not include exactly one that fits, or too few users have
        enough tweets.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> rows = [f'"{4 * (i % 2)}","{i}","May 16","NO_QUERY","ann","tweet {i}"' for i in range(5)]
      >>> path = folder / "training.1600000.processed.noemoticon.csv"
      >>> _ = path.write_text("\n".join([*rows, ""]), encoding="latin-1")
      >>> data = load_sent140(folder, min_examples=5, dim=3)
      >>> data.name, data.train.examples[0].shape, data.test.examples[0].shape
      ('sent140, hashed words', (3, 3), (2, 3))

    Reference:
      Go, Bhayani and Huang, "Twitter sentiment classification using distant supervision", 2009;
      Pennington, Socher and Manning, "GloVe", 2014; Caldas et al., "LEAF", 2018.
    """
    directory = Path(directory)
    check_min_examples("min_examples", min_examples)
    sizes = Counter(user for user, _, _ in _tweets(directory))
    users = _choose(sizes, num_clients, min_examples, seed)
    parts = consecutive(np.array([sizes[user] for user in users]))
    train, test = split_parts(parts, test_fraction=test_fraction, seed=seed)
    number: dict[str, int] = {}  # the index of each word
    tweets: dict[str, list[tuple[list[int], int]]] = {user: [] for user in users}
    for user, label, text in _tweets(directory):
        if user in tweets:
            words = [number.setdefault(word, len(number)) for word in tokenize(text)]
            tweets[user].append((words, label))
    path = _vectors_file(directory, glove, dim)
    if path is None:
        table, known = _hashed(list(number), dim), np.ones(len(number), bool)
    else:
        table, known = _read_vectors(path, number, dim)
    flat = [tweet for user in users for tweet in tweets[user]]
    x = np.zeros((len(flat), dim), np.float32)
    for row, (words, _) in zip(x, flat, strict=True):
        if mine := [word for word in words if known[word]]:
            row[:] = table[mine].mean(axis=0, dtype=np.float64)
    y = np.array([label for _, label in flat], np.int32)
    pool = Pool("sent140", "real", 2, (x, y), (x, y))
    if path is None:
        pool = pool._replace(name="sent140, hashed words", kind="surrogate")
    return federate(pool, train, test)


def check_sent140(directory: str | Path) -> None:
    """Raises `load_sent140`'s error if the tweet files are missing, without reading any file.

    Example:
      >>> try:
      ...     check_sent140("nowhere")
      ... except FileNotFoundError as error:
      ...     print(str(error).partition(" and ")[0])
      no training.1600000.processed.noemoticon.csv
    """
    _files(Path(directory))


def tokenize(text: str) -> list[str]:
    """Splits a tweet into words of the form that GloVe's Twitter vectors use.

    HTML entities such as ``&amp;`` are decoded, and letters are converted to lower case. Then, from
    left to right, a URL (``http://``, ``https://``, ``www.``) becomes ``<url>``, ``@name`` becomes
    ``<user>``, ``#name`` becomes ``<hashtag>`` and the name, digits with ``. , :`` between them
    become ``<number>``, and letters, digits, underscores and inner apostrophes make a word. Any
    other character is a word, followed by ``<repeat>`` if the character is repeated.

    Example:
      >>> tokenize("@Ann I'm 4.5 &lt;3 #Happy!!! http://t.co/x")
      ['<user>', "i'm", '<number>', '<', '<number>', '<hashtag>', 'happy', '!', '<repeat>', '<url>']

    Reference:
      Pennington, Socher and Manning, "GloVe", 2014, ``preprocess-twitter.rb``.
    """
    words = []
    for match in _TOKEN.finditer(html.unescape(text).lower()):
        kind, found = str(match.lastgroup), match[0]
        if kind in ("url", "user", "number"):
            words.append(f"<{kind}>")
        elif kind == "hashtag":
            words += ["<hashtag>", match["hashtag"]]
        elif kind == "again" and match["again"]:
            words += [match["mark"], "<repeat>"]
        else:
            words.append(found)
    return words


def _choose(
    sizes: Counter[str], num_clients: int | None, min_examples: int, seed: int
) -> list[str]:
    users = sorted(user for user, size in sizes.items() if size >= min_examples)
    if len(users) < (num_clients or 1):
        raise ValueError(
            f"{len(users)} users have {min_examples} tweets or more; "
            "lower num_clients or min_examples"
        )
    if num_clients is None:
        return users
    order = generator(seed).permutation(len(users))
    return [users[i] for i in order[:num_clients]]


# Tweets


def _files(directory: Path) -> list[Path]:
    official = directory / _CSV
    if official.is_file():
        return [official]
    if here := sorted(directory.glob("*.json")):
        return here
    try:
        return [path for split in ("train", "test") for path in json_files(directory / split)]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no {_CSV} and no .json files in {directory}, and {error}: give the folder of "
            "Sentiment140's official file or of LEAF's JSON files"
        ) from error


def _tweets(directory: Path) -> Iterator[tuple[str, int, str]]:
    """Yields user, label and text of every non-neutral tweet."""
    seen: dict[tuple[Path, str], Path] = {}  # users, by folder
    for path in _files(directory):
        if path.name == _CSV:
            yield from _official(path)
            return
        for user, (x, y) in read_users(path).items():
            first = seen.setdefault((path.parent, user), path)
            if first is not path:
                raise ValueError(f"{path}: user {user!r}: already in {first.name}")
            for i, (row, label) in enumerate(zip(x, y, strict=True)):
                text = row[_TEXT] if isinstance(row, list) and len(row) > _TEXT else None
                if not isinstance(text, str) or label not in (0, 1):
                    raise ValueError(
                        f"{path}: user {user!r}: tweet {i}: x must be a list: id, date, query, "
                        f"user, text; y is {label!r}, and must be 0 or 1"
                    )
                yield user, int(label), text


def _official(path: Path) -> Iterator[tuple[str, int, str]]:
    record = 0
    try:
        with path.open(encoding="latin-1", newline="") as file:
            for row in csv.reader(_lines(file)):
                if row == [_END]:
                    return
                record += 1
                if row and row[-1].endswith(_END):
                    raise ValueError("cut off")
                if len(row) != 6 or row[0] not in _LABELS or not row[4]:
                    raise ValueError(f"it must be {_COLUMNS}, with polarity 0, 2 or 4")
                label = _LABELS[row[0]]
                if label is not None:
                    yield row[4], label, row[5]
    except (csv.Error, ValueError) as error:
        record += isinstance(error, csv.Error)  # the record that cannot be read is not counted yet
        raise ValueError(f"{path}: record {record}: {error}") from error


def _lines(file: Iterable[str]) -> Iterator[str]:
    # If the file ends inside a record, the end mark becomes part of that record and shows up in its
    # last column or its number of columns. Otherwise it is a separate last record.
    for line in file:
        is_whole = line.endswith(("\n", "\r", '"'))
        yield line if is_whole else line + _END
    yield _END


# Words


def _vectors_file(directory: Path, glove: str | Path | None, dim: int) -> Path | None:
    if glove is not None:
        path = Path(glove)
        if not path.is_file():
            raise FileNotFoundError(f"no {path.name} in {path.parent}: give a file of GloVe")
        return path
    lengths = {path: _dimension(path) for path in sorted(directory.glob("glove*.txt"))}
    found = [path for path, length in lengths.items() if length == dim]
    if lengths and len(found) != 1:
        names = " and ".join(f"{path.name} has {length}" for path, length in lengths.items())
        raise ValueError(
            f"{directory}: {names} numbers a word, and dim is {dim}; give one that fits as glove"
        )
    return found[0] if found else None


def _dimension(path: Path) -> int:
    check_regular(path)
    with path.open("rb") as file:
        return file.readline().count(b" ")


def _read_vectors(
    path: Path, number: dict[str, int], dim: int
) -> tuple[Float32[np.ndarray, "words dim"], Bool[np.ndarray, " words"]]:
    """Word vectors, and whether each word is in the file."""
    # Read bytes, because one of GloVe's words, U+0085, is a line break in text mode. Keep only the
    # vectors of words that occur, because the whole file would fill the memory.
    wanted = {word.encode(errors="surrogatepass"): i for word, i in number.items()}
    table, known = np.zeros((len(number), dim), np.float32), np.zeros(len(number), bool)
    line, record = b"", 0
    with path.open("rb") as file:
        try:
            for line in file:
                record += 1
                if line.count(b" ") != dim:
                    raise ValueError(f"a word and {line.count(b' ')} numbers; dim is {dim}")
                word, _, numbers = line.partition(b" ")
                if (row := wanted.get(word)) is None:
                    continue
                with np.errstate(over="ignore"):
                    table[row] = np.array([float(value) for value in numbers.split(b" ")])
                if not np.isfinite(table[row]).all():
                    raise ValueError("not finite in single precision")
                known[row] = True
            if not line.endswith(b"\n"):
                raise ValueError("cut off: the file must end with a line break")
        except ValueError as error:
            raise ValueError(f"{path}: line {record}: {error}") from error
    return table, known


def _hashed(words: list[str], dim: int) -> Float32[np.ndarray, "words dim"]:
    # Use CRC-32, because it is the same on every machine, unlike Python's hash.
    rng = generator(_HASHED_SEED)
    table = rng.standard_normal((_BUCKETS, dim), dtype=np.float32)
    return table[[zlib.crc32(word.encode(errors="surrogatepass")) % _BUCKETS for word in words]]
