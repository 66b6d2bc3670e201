"""Sentiment140: a client is a Twitter user, an example a tweet as the mean of its words' vectors.

A tweet becomes tokens as the authors of GloVe's Twitter vectors made them, a little simplified; see
`tokenize`. Word vectors are read line by line, and only those of words that occur are kept.
"""

import csv
import html
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int64

from fedjax_mm.checks import check_count
from fedjax_mm.data.federate import federate, split_parts
from fedjax_mm.data.federated import DataKind, FederatedData, Pool
from fedjax_mm.data.leaf import json_files, read_users
from fedjax_mm.data.partition import Parts

_CSV = "training.1600000.processed.noemoticon.csv"
_COLUMNS = "polarity, id, date, query, user, text"
_LABELS = {"0": 0, "2": None, "4": 1}
_END = "\uffff"  # not in latin-1; an open quote swallows it
_TEXT = 4  # LEAF's place of the text; the first is the id
_TOKEN = re.compile(
    r"(?P<url>(?:https?://|www\.)\S+)"
    r"|(?P<user>@\w+)"
    r"|\#(?P<hashtag>\w+)"
    r"|(?P<number>\d+(?:[.,:]\d+)*(?!\w))"
    r"|(?P<word>\w+(?:'\w+)*)"
    r"|(?P<mark>[^\w\s])(?P<again>(?P=mark)*)"
)
_BUCKETS = 2**15  # words that share one share a vector
_HASHED_SEED = 140

_TOPICS = 20
_WORDS = 100  # of each list of invented words
_SENTIMENT, _SHARED = 2, 1  # lists of words: negative, positive; without a topic
_TELLING = (0.05, 0.5)  # of a client's words
_CLARITY = 0.75
_BLOCK_TWEETS = 2048  # averaged at once; the data do not depend on it


def load_sent140(
    directory: str | Path,
    *,
    num_clients: int | None = None,
    min_examples: int = 50,
    test_fraction: float = 0.4,
    dim: int = 200,
    glove: str | Path | None = None,
    seed: int = 0,
) -> FederatedData:
    r"""Sentiment140, one client for each Twitter user with enough tweets; label 1 is positive.

    Features are ``float32[examples, dim]``: the mean of the vectors of a tweet's words, zeros if no
    word has a vector. Words are made by `fedjax_mm.data.sent140.tokenize`. Without GloVe's vectors
    a word's hash picks one of 32,768 Gaussian vectors, the same ones always; the data are then a
    surrogate, "sent140, hashed words".

    Args:
      directory: with the official ``training.1600000.processed.noemoticon.csv``, where neutral
        tweets are dropped; or with LEAF's JSON files of tweets, in it or in its folders ``train``
        and ``test``, which are put together. (LEAF counts neutral tweets as negative.)
      num_clients: so many users at random, in random order: more of them begin with the same ones.
        By default all, in the order of their names.
      min_examples: users with fewer tweets are left out.
      test_fraction: of each client's tweets, at random.
      dim: d, the length of a word's vector.
      glove: a text file of GloVe, such as ``glove.twitter.27B.200d.txt``: a word and d numbers in a
        line. By default the ``glove*.txt`` in `directory` that has d numbers, if there is one.
      seed: of the choice of users and of the split.

    Raises:
      FileNotFoundError: if there are no tweets, or `glove` is not there.
      ValueError: if a row of a file is malformed, a vector is not of d finite numbers, several
        files of vectors would do, or too few users have enough tweets.

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
    for name, value in (("num_clients", num_clients), ("dim", dim)):
        check_count(name, value)
    _check_min_examples(min_examples)
    sizes = Counter(user for user, _, _ in _tweets(directory))
    users = _choose(sizes, num_clients, min_examples, seed)
    parts = _consecutive(np.array([sizes[user] for user in users]))
    train, test = split_parts(parts, test_fraction=test_fraction, seed=seed)
    number: dict[str, int] = {}  # of a word
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
    name, kind = _title(path)
    return federate(Pool(name, kind, 2, (x, y), (x, y)), train, test)


def check_sent140(directory: str | Path) -> None:
    """Raises what `load_sent140` raises if there are no tweets, without reading any."""
    _files(Path(directory))


def tokenize(text: str) -> list[str]:
    """The words of a tweet, for the vocabulary of GloVe's Twitter vectors.

    HTML's ``&amp;`` and the like are decoded, and letters become small. Then, from left to right:
    an address (``http://``, ``https://``, ``www.``) is ``<url>``, ``@name`` is ``<user>``,
    ``#name`` is ``<hashtag>`` and name, digits with ``. , :`` between them are ``<number>``, a word
    is letters, digits, underscores and apostrophes inside, and any other character is a word of its
    own; if it is repeated, ``<repeat>`` stands for the rest.

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


def surrogate_tweets(
    num_clients: int,
    *,
    dim: int = 200,
    min_examples: int = 50,
    test_fraction: float = 0.4,
    seed: int = 0,
) -> FederatedData:
    """Invented tweets, in the shape of Sentiment140: the same pipeline where the data is not there.

    A tweet of 4 to 24 words is positive with its client's probability, Beta(2, 2), and has one of
    20 topics, by its client's Dirichlet(0.3). Each word carries sentiment with its client's
    probability, between 0.05 and 0.5, and is then of the tweet's own sentiment with probability
    0.75; other words are of the topic or of no topic. Of 2,300 words in all, in lists of 100 with
    frequencies that fall like ``1 / rank``, each has a Gaussian vector; a tweet is their mean,
    ``float32[dim]``. A linear classifier of all clients' tweets is right for about 73 % of them if
    `dim` is 200.

    The first clients do not change when `num_clients` grows.

    Args:
      num_clients: N.
      dim: d, the length of a word's vector.
      min_examples: of a client; it has LogNormal(3, 1), rounded down, more.
      test_fraction: of each client's tweets.
      seed: of all draws.

    Raises:
      ValueError: if an argument is out of its range.

    Example:
      >>> data = surrogate_tweets(3, dim=10, min_examples=20)
      >>> data.name, data.kind, data.train.examples[0].shape[1:], data.train.min_count >= 12
      ('invented tweets', 'surrogate', (10,), True)
    """
    check_count("num_clients", num_clients)
    check_count("dim", dim)
    _check_min_examples(min_examples)
    streams = iter(np.random.SeedSequence(seed).spawn(9))

    def rng() -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(next(streams)))

    counts = min_examples + rng().lognormal(3, 1, num_clients).astype(np.int64)
    train, test = split_parts(_consecutive(counts), test_fraction=test_fraction, seed=seed)
    owner = np.repeat(np.arange(num_clients), counts)
    positive = rng().beta(2, 2, num_clients)
    topics = rng().dirichlet(np.full(_TOPICS, 0.3), num_clients).cumsum(axis=1)
    telling = rng().uniform(*_TELLING, num_clients)
    y = (rng().random(len(owner)) < positive[owner]).astype(np.int32)
    topic = (rng().random((len(owner), 1)) > topics[owner, :-1]).sum(axis=1)
    table = rng().standard_normal(((_SENTIMENT + _SHARED + _TOPICS) * _WORDS, dim))
    lengths = rng().integers(4, 24, len(owner), endpoint=True)
    words = _invented_words(y, topic, telling[owner], lengths, rng())
    x = _means(table.astype(np.float32), words, lengths)
    pool = Pool("invented tweets", "surrogate", 2, (x, y), (x, y))
    return federate(pool, train, test)


def _check_min_examples(min_examples: int) -> None:
    check_count("min_examples", min_examples)
    if min_examples < 2:
        raise ValueError("min_examples is 1; a training and a test set need 2 tweets")


def _consecutive(counts: Int64[np.ndarray, " clients"]) -> Parts:
    """The rows of clients whose examples lie one client after the other."""
    return np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])


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
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(users))
    return [users[i] for i in order[:num_clients]]


# Tweets


def _files(directory: Path) -> list[Path]:
    """The official file, or all of LEAF's."""
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
    """User, label and text of all tweets that are not neutral."""
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
                place = f"{path}: user {user!r}: tweet {i}"
                if not (isinstance(row, list) and len(row) > _TEXT and isinstance(row[_TEXT], str)):
                    raise ValueError(f"{place}: x must be a list: id, date, query, user, text")
                if label not in (0, 1):
                    raise ValueError(f"{place}: y is {label!r}; it must be 0 or 1")
                yield user, int(label), row[_TEXT]


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
    except csv.Error as error:
        raise ValueError(f"{path}: record {record + 1}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: record {record}: {error}") from error


def _lines(file: Iterable[str]) -> Iterator[str]:
    """The lines, and an end that is no record of its own if the last one is cut off."""
    for line in file:
        is_whole = line.endswith(("\n", "\r", '"'))
        yield line if is_whole else line + _END
    yield _END


# Words


def _title(vectors: Path | None) -> tuple[str, DataKind]:
    return ("sent140, hashed words", "surrogate") if vectors is None else ("sent140", "real")


def _vectors_file(directory: Path, glove: str | Path | None, dim: int) -> Path | None:
    if glove is not None:
        path = Path(glove)
        if not path.is_file():
            raise FileNotFoundError(f"no {path.name} in {path.parent}: give a file of GloVe")
        return path
    found = [path for path in sorted(directory.glob("glove*.txt")) if _dimension(path) == dim]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ValueError(f"{directory}: {names} have {dim} numbers; say which by glove")
    return found[0] if found else None


def _dimension(path: Path) -> int:
    with path.open("rb") as file:
        return file.readline().count(b" ")


def _read_vectors(
    path: Path, number: dict[str, int], dim: int
) -> tuple[Float32[np.ndarray, "words dim"], Bool[np.ndarray, " words"]]:
    """The vectors of the words that are in the file, and which those are.

    In bytes: a word of GloVe's is a line break to Python, U+0085.
    """
    wanted = {word.encode(errors="surrogatepass"): i for word, i in number.items()}
    table, known = np.zeros((len(number), dim), np.float32), np.zeros(len(number), bool)
    line, record = b"", 0
    with path.open("rb") as file:
        for record, line in enumerate(file, start=1):
            if line.count(b" ") != dim:
                raise ValueError(
                    f"{path}: line {record}: a word and {line.count(b' ')} numbers; dim is {dim}"
                )
            word, _, numbers = line.partition(b" ")
            row = wanted.get(word)
            if row is None:
                continue
            try:
                with np.errstate(over="ignore"):
                    table[row] = np.array([float(value) for value in numbers.split(b" ")])
            except ValueError as error:
                raise ValueError(f"{path}: line {record}: {error}") from error
            if not np.isfinite(table[row]).all():
                raise ValueError(f"{path}: line {record}: not finite in single precision")
            known[row] = True
    if not line.endswith(b"\n"):
        raise ValueError(f"{path}: line {record}: cut off: the file must end with a line break")
    return table, known


def _hashed(words: list[str], dim: int) -> Float32[np.ndarray, "words dim"]:
    """Gaussian vectors, the same for the same word on every machine."""
    rng = np.random.Generator(np.random.PCG64(_HASHED_SEED))
    table = rng.standard_normal((_BUCKETS, dim), dtype=np.float32)
    return table[[zlib.crc32(word.encode(errors="surrogatepass")) % _BUCKETS for word in words]]


# Invented tweets


def _invented_words(
    y: np.ndarray,
    topic: Int64[np.ndarray, " tweets"],
    telling: np.ndarray,
    lengths: Int64[np.ndarray, " tweets"],
    rng: np.random.Generator,
) -> Int64[np.ndarray, " words"]:
    """All tweets' words, one tweet after the other: lists of 100, the first two of sentiment."""
    tweet = np.repeat(np.arange(len(lengths)), lengths)
    kind, which, place = rng.random((len(tweet), 3)).T
    lists = np.where(which < 0.5, _SENTIMENT, _SENTIMENT + _SHARED + topic[tweet])
    lists = np.where(
        kind < telling[tweet], np.where(which < _CLARITY, y[tweet], 1 - y[tweet]), lists
    )
    frequency = (1 / np.arange(1, _WORDS + 1)).cumsum()
    rank = np.searchsorted(frequency / frequency[-1], place, side="right")
    return lists * _WORDS + rank


def _means(
    table: Float32[np.ndarray, "vocabulary dim"],
    words: Int64[np.ndarray, " words"],
    lengths: Int64[np.ndarray, " tweets"],
) -> Float32[np.ndarray, "tweets dim"]:
    """The mean of each tweet's vectors, summed in the order of its words: the same everywhere."""
    x = np.zeros((len(lengths), table.shape[1]), np.float32)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, len(lengths), _BLOCK_TWEETS):
        block = slice(first, first + _BLOCK_TWEETS)
        for place in range(lengths[block].max()):
            longer = np.flatnonzero(lengths[block] > place)
            x[first + longer] += table[words[starts[first + longer] + place]]
        x[block] /= lengths[block, None].astype(np.float32)
    return x
