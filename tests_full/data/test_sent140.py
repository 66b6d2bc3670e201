"""Readers of Sentiment140's files, damaged files, and surrogate tweets."""

import json
import time

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedjax_mm.data.sent140 import check_sent140, load_sent140, tokenize
from fedjax_mm.data.surrogate import surrogate_tweets

CSV = "training.1600000.processed.noemoticon.csv"


def row(polarity, user, text):
    """A row of the official file. Quotes in `text` must be doubled."""
    return f'"{polarity}","1467","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","{text}"\n'


ROWS = [
    row(0, "ann", 'sad, very ""sad""'),
    row(4, "bob", "good caf\u00e9"),
    row(2, "bob", "good good"),
    row(4, "ann", "good @Bob"),
    row(0, "cat", "sad"),
    row(4, "ann", "nothing here is known"),
    row(0, "bob", "SAD &lt;unk&gt; good"),
]
VECTORS = {"good": "1 0.5", "sad": "-1 0.25", ",": "0 4", "caf\u00e9": "3 3", "<user>": "7 8"}
NEL = "\u0085 0.1 0.2\n"
"""A line of the published Twitter vectors, whose word is a line break to Python."""
MEANS = {
    "ann": [(0, -2 / 3, 1.5), (1, 0, 0), (1, 4, 4.25)],
    "bob": [(0, 0, 0.375), (1, 2, 1.75)],
    "cat": [(0, -1, 0.25)],
}
"""Label and mean vector of the known words of each non-neutral tweet."""


def write_csv(folder, *rows):
    (folder / CSV).write_bytes("".join(rows or ROWS).encode("latin-1"))


def leaf_file(**users):
    """The content of a LEAF file from user=[(label, text), ...]."""

    def entry(user, tweets):
        x = [["1467", "Mon Apr 06", "NO_QUERY", user, text, "training"] for _, text in tweets]
        return {"x": x, "y": [label for label, _ in tweets]}

    return {
        "users": list(users),
        "num_samples": [len(tweets) for tweets in users.values()],
        "user_data": {user: entry(user, tweets) for user, tweets in users.items()},
    }


# The last tweet ends with half a surrogate pair.
ANN = [(0, 'sad, very "sad"'), (1, "good @Bob"), (1, "nothing here is known \ud83d")]
BOB = [(1, "good caf\u00e9"), (0, "SAD &lt;unk&gt; good")]
CAT = [(0, "sad")]


def write_json(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def write_glove(path, *, last=NEL, **changed):
    lines = [f"{word} {numbers}\n" for word, numbers in (VECTORS | changed).items()]
    path.write_bytes("".join([*lines, last]).encode())
    return path


def clients(data):
    """The sorted labels and features of the tweets of each client."""
    mine = [[] for _ in data.train.counts]
    for split in (data.train, data.test):
        x, y = (np.asarray(array) for array in split.examples)
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        for k, label, features in zip(
            np.repeat(np.arange(len(split.counts)), split.counts), y, x, strict=True
        ):
            mine[k].append((int(label), *features.tolist()))
    return [sorted(tweets) for tweets in mine]


def same(found, users):
    assert len(found) == len(users)
    for tweets, user in zip(found, users, strict=True):
        np.testing.assert_allclose(tweets, MEANS[user], rtol=1e-6)


# Files


def official(folder):
    write_csv(folder)


def leaf_folder(folder):
    write_json(folder / "a.json", leaf_file(cat=CAT, bob=BOB))
    write_json(folder / "b.json", leaf_file(ann=ANN))


def leaf_split(folder):
    write_json(folder / "train" / "all_data_keep_0_train.json", leaf_file(bob=BOB[:1], ann=ANN[:2]))
    write_json(folder / "test" / "all_data_keep_0_test.json", leaf_file(ann=ANN[2:], bob=BOB[1:]))


@pytest.mark.parametrize("write", [official, leaf_folder, leaf_split])
def test_features_are_means_of_word_vectors(write, tmp_path):
    write(tmp_path)
    write_glove(tmp_path / "glove.twitter.27B.2d.txt")
    (tmp_path / "glove.twitter.27B.1d.txt").write_text("good 1\n")
    check_sent140(tmp_path)
    data = load_sent140(tmp_path, min_examples=2, dim=2)
    assert (data.name, data.kind, data.num_classes) == ("sent140", "real", 2)
    same(clients(data), ["ann", "bob"])
    assert (data.train.counts.tolist(), data.test.counts.tolist()) == ([2, 1], [1, 1])
    same(clients(load_sent140(tmp_path, min_examples=3, dim=2)), ["ann"])


def test_vectors_may_be_in_another_file(tmp_path):
    write_csv(tmp_path)
    write_glove(tmp_path / "glove.a.txt")
    write_glove(tmp_path / "glove.b.txt")
    with pytest.raises(
        ValueError, match=r"glove\.a\.txt has 2 and glove\.b\.txt has 2 numbers a word"
    ):
        load_sent140(tmp_path, min_examples=2, dim=2)
    path = write_glove(tmp_path / "mine", good="2 1")
    data = load_sent140(tmp_path, min_examples=2, dim=2, glove=path)
    assert (0, 0.5, 0.625) in clients(data)[1]
    with pytest.raises(FileNotFoundError, match=r"no absent in .*: give a file of GloVe"):
        load_sent140(tmp_path, min_examples=2, dim=2, glove=tmp_path / "absent")


def test_without_vectors_words_are_hashed_into_a_surrogate(tmp_path):
    texts = {"a": "good", "b": "sad", "c": "Sad good", "d": ""}
    write_csv(tmp_path, *(row(0, user, text) for user, text in texts.items() for _ in "12"))
    data = load_sent140(tmp_path, min_examples=2, dim=500)
    assert (data.name, data.kind) == ("sent140, hashed words", "surrogate")
    good, sad, both, nothing = np.array(data.train.examples[0])
    assert abs(np.corrcoef(good, sad)[0, 1]) < 0.2
    assert 0.9 < good.std() < 1.1
    np.testing.assert_allclose(both, (good + sad) / 2, rtol=1e-5, atol=1e-7)
    assert not nothing.any()
    np.testing.assert_allclose(good[:3], [-0.57748604, -2.455307, 0.95389527], rtol=1e-6)
    again = load_sent140(tmp_path, min_examples=2, dim=500, seed=5)
    np.testing.assert_array_equal(again.train.examples[0][0], good)


def test_fewer_users_are_a_prefix_of_more_users(tmp_path):
    names = [f"u{i}" for i in range(8)]
    write_csv(tmp_path, *(row(0, name, f"{i}a good") for i, name in enumerate(names) for _ in "12"))
    glove = tmp_path / "glove.txt"
    glove.write_text("".join(f"{i}a {i}\n" for i in range(8)))

    def drawn(num_clients, seed):
        data = load_sent140(tmp_path, num_clients=num_clients, min_examples=2, dim=1, seed=seed)
        return [int(tweets[0][1]) for tweets in clients(data)]

    assert drawn(None, 0) == drawn(None, 1) == list(range(8))
    assert drawn(3, 0) == drawn(8, 0)[:3]
    assert sorted(drawn(8, 0)) == list(range(8))
    assert len({tuple(drawn(3, seed)) for seed in range(6)}) > 4
    with pytest.raises(ValueError, match="8 users have 2 tweets or more; lower num_clients or min"):
        drawn(9, 0)


def test_the_split_is_random(tmp_path):
    words = [f"{i}a" for i in range(10)]
    write_csv(tmp_path, *(row(0, "ann", word) for word in words))
    (tmp_path / "glove.txt").write_text("".join(f"{w} {i}\n" for i, w in enumerate(words)))

    def test_tweets(seed):
        data = load_sent140(tmp_path, min_examples=10, dim=1, seed=seed, test_fraction=0.3)
        assert [v for _, v in clients(data)[0]] == list(range(10))
        return tuple(np.asarray(data.test.examples[0]).ravel().tolist())

    assert test_tweets(0) == test_tweets(0)
    assert len({test_tweets(seed) for seed in range(5)}) > 3
    assert len(test_tweets(0)) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's OK... don't!", ["it's", "ok", ".", "<repeat>", "don't", "!"]),
        ("http://a.b/c?d WWW.x.org, x", ["<url>", "<url>", "x"]),
        (
            "@a_1: #Yes &quot;no&quot;&amp;",
            ["<user>", ":", "<hashtag>", "yes", '"', "no", '"', "&"],
        ),
        ("12 3.5 10:30 1,000. 2nite 4ever", ["<number>"] * 4 + [".", "2nite", "4ever"]),
        ("# @ 'caf\u00c9' --", ["#", "@", "'", "caf\u00e9", "'", "-", "<repeat>"]),
        (" \t ", []),
    ],
)
def test_tokenize(text, words):
    assert tokenize(text) == words


# Damaged files

WHOLE = "".join(ROWS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE + '"0","1","d","q","ann"\n', "record 8: it must be polarity, id, date"),
        (WHOLE + '"0","1","d","q","ann","good","more"\n', "record 8: it must be polarity"),
        (row(3, "ann", "good") + WHOLE, "record 1: it must be .* with polarity 0, 2 or 4"),
        (row(0, "", "good") + WHOLE, "record 1: it must be polarity"),
        (WHOLE + "\n", "record 8: it must be polarity"),
        (WHOLE[:-2], "record 7: cut off"),  # without the closing quote
        (WHOLE[:-22], "record 7: cut off"),  # without the text
        (WHOLE[:-23], "record 7: cut off"),  # without the opening quote
        (WHOLE[:-24], "record 7: it must be polarity"),  # without the comma
        (WHOLE[:-25], "record 7: cut off"),
        (WHOLE[:-75], "record 7: cut off"),
        (ROWS[0] + '"' + WHOLE, "record 2: it must be polarity"),
        (WHOLE + row(0, "ann", "x" * 200_000), "record 8: field larger than field limit"),
        ("", "0 users have 2 tweets or more"),
    ],
)
def test_wrong_official_files_are_refused(content, message, tmp_path):
    (tmp_path / CSV).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        load_sent140(tmp_path, min_examples=2, dim=2)
    assert "0 users" in message or str(tmp_path / CSV) in str(error.value)


def test_an_official_file_may_lack_the_last_line_break(tmp_path):
    write_csv(tmp_path, WHOLE[:-1])
    assert load_sent140(tmp_path, min_examples=2, dim=2).num_clients == 2


def changed(change):
    content = leaf_file(ann=ANN, bob=BOB)
    change(content["user_data"]["bob"])
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["ann"', "not a LEAF file"),
        (
            changed(lambda bob: bob["y"].pop()),
            r"user 'bob': the lengths of x and y, and num_samples, are \[2, 1, 2\]",
        ),
        (changed(lambda bob: bob.pop("x")), r"user_data\.bob\.x: Field required"),
        (changed(lambda bob: bob["x"][1].__delitem__(slice(4, 6))), "user 'bob': tweet 1: x must"),
        (changed(lambda bob: bob["x"].__setitem__(0, "good")), "user 'bob': tweet 0: x must be a"),
        (changed(lambda bob: bob["x"][1].__setitem__(4, 3)), "user 'bob': tweet 1: x must be a li"),
        (
            changed(lambda bob: bob["y"].__setitem__(1, 4)),
            "user 'bob': tweet 1: .* y is 4, and must",
        ),
        (
            changed(lambda bob: bob["y"].__setitem__(0, "0")),
            "user 'bob': tweet 0: .* y is '0', and",
        ),
        (changed(lambda bob: bob["y"].__setitem__(0, [0])), r"tweet 0: .* y is \[0\], and must"),
        (leaf_file(cat=CAT), r"user 'cat': already in a\.json"),
    ],
)
def test_wrong_leaf_files_are_refused(content, message, tmp_path):
    write_json(tmp_path / "a.json", leaf_file(cat=CAT))
    write_json(tmp_path / "b.json", content)
    with pytest.raises(ValueError, match=message) as error:
        load_sent140(tmp_path, min_examples=2, dim=2)
    assert str(tmp_path / "b.json") in str(error.value)


def test_missing_files_are_named(tmp_path):
    for load in (check_sent140, load_sent140):
        with pytest.raises(FileNotFoundError, match=f"no {CSV} and no .json files in .*train has"):
            load(tmp_path)
    write_json(tmp_path / "train" / "a.json", "not read")
    for load in (check_sent140, load_sent140):
        with pytest.raises(FileNotFoundError, match=r"test has no \.json files"):
            load(tmp_path)
    write_json(tmp_path / "test" / "a.json", "not read")
    check_sent140(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"good": "1"}, "line 1: a word and 1 numbers; dim is 2"),
        ({"sad": "1 2 3"}, "line 2: a word and 3 numbers; dim is 2"),
        ({"unknown": "1"}, "line 6: a word and 1 numbers; dim is 2"),
        ({"sad": "1 nan"}, "line 2: not finite in single precision"),
        ({",": "-inf 2"}, "line 3: not finite in single precision"),
        ({"sad": "1 1e39"}, "line 2: not finite in single precision"),
        ({"sad": "1 x"}, "line 2: could not convert string to float"),
        ({"sad": "1 "}, "line 2: could not convert string to float"),
        ({"last": "very 0.1 0.2"}, "line 6: cut off: the file must end with a line break"),
        ({"last": "very 0.1"}, "line 6: a word and 1 numbers; dim is 2"),
        ({"last": "\n"}, "line 6: a word and 0 numbers; dim is 2"),
    ],
)
def test_wrong_vectors_are_refused(arguments, message, tmp_path):
    write_csv(tmp_path)
    path = write_glove(tmp_path / "vectors.txt", **arguments)
    with pytest.raises(ValueError, match=message) as error:
        load_sent140(tmp_path, min_examples=2, dim=2, glove=path)
    assert str(path) in str(error.value)


def test_vectors_of_another_dimension_are_refused(tmp_path):
    write_csv(tmp_path)
    write_glove(tmp_path / "glove.2d.txt")
    with pytest.raises(ValueError, match=r"glove\.2d\.txt has 2 numbers a word, and dim is 3"):
        load_sent140(tmp_path, min_examples=2, dim=3)


def test_an_empty_file_of_vectors_is_refused(tmp_path):
    write_csv(tmp_path)
    (tmp_path / "glove.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"glove\.txt: line 0: cut off"):
        load_sent140(tmp_path, min_examples=2, dim=2, glove=tmp_path / "glove.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 0}, "num_clients is 0; it must be a positive whole number"),
        ({"dim": 0}, "dim is 0; it must be a positive whole number"),
        ({"min_examples": 1}, "min_examples is 1; a training and a test set need 2 ex"),
        ({"min_examples": 2.5}, "min_examples is 2.5; it must be a positive whole number"),
        ({"test_fraction": 1.0}, "test_fraction is 1.0; it must lie between 0 and 1"),
    ],
)
@pytest.mark.parametrize("source", [load_sent140, surrogate_tweets])
def test_wrong_arguments_are_refused(source, arguments, message, tmp_path):
    write_csv(tmp_path)
    settings = {"num_clients": 2, "min_examples": 2, "dim": 2} | arguments
    if source is load_sent140:
        settings["directory"] = tmp_path
    with pytest.raises(ValueError, match=message):
        source(**settings)


# Surrogate tweets


def pooled(split):
    return tuple(np.asarray(array) for array in split.examples)


def test_surrogate_tweets_are_reproducible():
    data = surrogate_tweets(4, dim=3, seed=7)
    assert (data.name, data.kind, data.num_classes) == ("invented tweets", "surrogate", 2)
    x, y = pooled(data.train)
    assert data.train.counts.tolist() == [36, 82, 37, 132]
    assert data.test.counts.tolist() == [24, 54, 25, 88]
    assert y[:12].tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0]
    np.testing.assert_allclose(x[0], [0.58632600, -0.10768399, 0.37029478], rtol=1e-6)
    np.testing.assert_allclose(x[-1], [0.27992097, -0.43852958, 0.29704768], rtol=1e-6)
    np.testing.assert_allclose(np.abs(x).sum(dtype=np.float64), 224.1613, rtol=1e-6)


def test_surrogate_clients_do_not_depend_on_their_number():
    few, many = surrogate_tweets(3, dim=4), surrogate_tweets(9, dim=4)
    for one, other in ((few.train, many.train), (few.test, many.test)):
        assert one.counts.tolist() == other.counts.tolist()[:3]
        for mine, theirs in zip(pooled(one), pooled(other), strict=True):
            np.testing.assert_array_equal(mine, theirs[: len(mine)])
    assert not np.array_equal(surrogate_tweets(3, dim=4, seed=1).train.counts, few.train.counts)


def test_surrogate_clients_differ_in_size_and_in_mood():
    data = surrogate_tweets(927, dim=1, seed=3)
    sizes = np.asarray(data.train.counts) + np.asarray(data.test.counts)
    assert 50 <= sizes.min() <= 52
    assert 65 < np.median(sizes) < 75  # 50 + e^3 = 70
    assert 76 < sizes.mean() < 90  # 50 + e^3.5 = 83
    assert sizes.max() > 250
    np.testing.assert_allclose(data.test.counts / sizes, 0.4, atol=0.011)
    _, y = pooled(data.train)
    assert 0.48 < y.mean() < 0.52
    moods = [part.mean() for part in np.split(y, np.cumsum(data.train.counts)[:-1])]
    assert 0.2 < np.std(moods) < 0.26  # 0.224 for Beta(2, 2), and noise of about 50 tweets
    assert min(surrogate_tweets(50, dim=1, min_examples=2).train.counts) < 5


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_surrogate_tweets_are_hard_to_learn(seed):
    data = surrogate_tweets(300, seed=seed)
    (x, y), (x_test, y_test) = pooled(data.train), pooled(data.test)
    model = LogisticRegression(max_iter=200).fit(x, y)
    right = model.predict(x_test) == y_test
    assert 0.70 < right.mean() < 0.76
    by_client = [part.mean() for part in np.split(right, np.cumsum(data.test.counts)[:-1])]
    assert np.percentile(by_client, 90) - np.percentile(by_client, 10) > 0.2
    one = LogisticRegression(max_iter=200).fit(x[:100], y[:100])
    assert one.score(x_test, y_test) < right.mean() - 0.06, "a few tweets do not teach it"


def test_surrogates_of_all_clients_are_fast():
    start = time.process_time()
    surrogate_tweets(927)
    assert time.process_time() - start < 6, "it takes less than 2 s"
