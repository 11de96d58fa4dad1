"""Tests data sets in files, and what a process reads of them."""

import functools
import gzip
import hashlib
import importlib
import io
import json
import tarfile

import jax
import numpy as np
import pytest


def every(split):
    """Returns all (inputs, labels) of a split."""
    return split.batch(np.arange(len(split)), None)


def batch(split, random=None):
    return split.batch(np.arange(min(len(split), 4)), random)


def cifar(folder, kind):
    """Makes an archive like CIFAR's. Returns the content of each file: image i of 4 has class i and a red corner."""
    record = lambda i: bytes([*[9] * (kind.labels - 1), i, 255]) + bytes(32 * 32 * 3 - 1)
    content = b"".join(map(record, range(4)))
    with tarfile.open(folder / kind.archive, "w:gz") as archive:
        for name in kind.train | kind.test:
            entry = tarfile.TarInfo(f"{kind.inside}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return content


@pytest.mark.parametrize(
    "name, archive, sha1, files",
    [("cifar10", "cifar-10-binary", "aadd24ac", 5), ("cifar100", "cifar-100-binary", "e207cd2e", 1)],
)
def test_cifar(data, tmp_path, monkeypatch, name, archive, sha1, files, refuses):
    load = lambda folder=tmp_path: data.load(name=name, synthetic=False, folder=str(folder), augment=True)
    refuses(rf"config\.data\.folder: there is no .*{archive}\.tar\.gz; get it: `curl .*{archive}\.tar\.gz http", load)
    kind = getattr(data.cifar, name.capitalize())
    content = cifar(tmp_path, kind)
    refuses(rf"\.bin in .* is damaged: expected the SHA1 sum {sha1}", load)
    for part in "train", "test":
        sums = dict.fromkeys(getattr(kind, part), hashlib.sha1(content, usedforsecurity=False).hexdigest())
        monkeypatch.setattr(kind, part, sums)
    found = load()
    assert (found.name, len(found.train), len(found.test)) == (name, 4 * files, 4)
    images, labels = batch(found.test)
    np.testing.assert_array_equal(labels, range(4))
    assert images.shape == (4, 32, 32, 3) and (images[:, 0, 0, 0] > 1).all() and (images[:, 0, 0, 1:] == 0).all()
    moved = batch(found.train, np.float32([[0.99, 0.5, 0.9, 0, 0], [0.5, 0.5, 0.1, 0, 0]] * 2))[0]
    assert (moved > 1).sum() == 2  # the corner was moved out of the image, or mirrored
    assert moved[1, 0, 31, 0] > 1 and moved[3, 0, 31, 0] > 1

    # Half of an archive, and no archive but its folder: its place is named, or itself.
    path = tmp_path / kind.archive
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refuses(r"config\.data\.folder: the files in .* can't be read: ", load)
    with tarfile.open(path, "w:gz") as archive:  # an archive with a link in the place of each file
        for file in kind.train | kind.test:
            entry = tarfile.TarInfo(f"{kind.inside}/{file}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "nowhere"
            archive.addfile(entry)
    refuses(r"(can't be read|is damaged)", load)
    path.write_bytes(whole)
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / kind.inside / next(iter(kind.test))).rename(tmp_path / "last")
    assert len(load().test) == 4  # from the archive, because the folder isn't whole
    (tmp_path / "last").rename(tmp_path / kind.inside / next(iter(kind.test)))
    path.unlink()
    for folder in tmp_path, tmp_path / kind.inside:
        again = load(folder)
        for ours, theirs in (again.train, found.train), (again.test, found.test):
            np.testing.assert_array_equal(every(ours)[0], every(theirs)[0])
            np.testing.assert_array_equal(every(ours)[1], every(theirs)[1])
    *_, last = kind.test
    (tmp_path / kind.inside / last).write_bytes(content[:-1])
    refuses(rf"{last} in .* is damaged", load)
    (tmp_path / kind.inside / last).unlink()
    refuses(rf"can't be read: .*No such file or directory: .*{last}", load)


def test_imagenet(data, tmp_path, refuses):
    image = pytest.importorskip("PIL.Image", reason="needs the extra `recipes`")
    load = lambda: data.load(name="imagenet", synthetic=False, folder=str(tmp_path), size=8, threads=2)
    refuses(r"config\.data\.folder: there is no folder .*/train; with image-net\.org.*torchvision", load)
    for part in ("train", "val"):
        for name, color in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
            (tmp_path / part / name).mkdir(parents=True)
            image.new("RGB", (20, 16), color).save(tmp_path / part / name / "1.JPEG")
    found = load()
    for images, labels in (batch(found.test), batch(found.train, np.float32([[0, 1, 1, 1, 0], [1, 0, 0.5, 0.5, 1]]))):
        np.testing.assert_array_equal(labels, [0, 1])
        assert images.shape == (2, 8, 8, 3) and (images[0, ..., 0] > 2).all() and (images[1, ..., 2] > 2).all()
    (tmp_path / "train/cat/1.JPEG").write_bytes(b"no image")
    refuses(r"cat/1\.JPEG can't be read", batch, load().train)
    (tmp_path / "val/bird").mkdir()
    refuses(r"expected the same classes in .*, got bird in one alone", load)


def test_fashion_mnist(data, tmp_path, monkeypatch, refuses):
    load = lambda: data.load(name="fashion_mnist", synthetic=False, folder=str(tmp_path), augment=False)
    refuses(r"there is no .*train-images-idx3-ubyte\.gz; `apt-get install dataset-fashion-mnist`", load)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"half of a file")
    refuses(r"train-images-idx3-ubyte\.gz is damaged", load)
    files = data.fashion_mnist.FILES
    for name in files:  # image i has class i, and pixel i in its corner
        part = bytes(16) + b"".join(bytes([i]) + bytes(783) for i in range(6)) if "images" in name else None
        content = part or bytes(8) + bytes(range(6))
        (tmp_path / name).write_bytes(gzip.compress(content))
        monkeypatch.setitem(files, name, hashlib.md5(content, usedforsecurity=False).hexdigest())
    for unpacked in (False, True):
        if unpacked:
            for name in files:
                (tmp_path / name).with_suffix("").write_bytes(gzip.decompress((tmp_path / name).read_bytes()))
                (tmp_path / name).unlink()
        found = load()
        assert (len(found.train), len(found.test)) == (6, 6)
        for split in (found.train, found.test):
            images, labels = batch(split)
            np.testing.assert_array_equal(labels, range(4))
            assert images.shape == (4, 28, 28, 1) and np.ptp(images[:, 1]) == 0
            assert (np.diff(images[:, 0, 0, 0]) > 0).all()
    path = (tmp_path / name).with_suffix("")
    path.write_bytes(path.read_bytes()[:-1])
    refuses(f"{path} is damaged: expected the MD5 sum", load)


def test_text(data, tmp_path, refuses):
    (tmp_path / "a.txt").write_bytes(bytes(range(200)) * 10)
    options = dict(name="text", synthetic=False)
    load = lambda files, context: data.load(files=str(files), context=context, tokens=256, **options)
    found = load(tmp_path / "*.txt", 16)
    for inputs, labels in (batch(found.train), batch(found.train, np.full((4, 5), 0.5, np.float32))):
        assert inputs.shape == labels.shape == (4, 16)
        np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    assert len(found.train) == 1800 // 16
    refuses(r"config\.data\.files: .* is 1 files with 2,000 bytes; expected more", load, tmp_path / "*.txt", 1000)
    refuses(r"config\.data\.files: .* is 0 files with 0 bytes; expected more", load, tmp_path / "*.md", 16)


def test_byte_pairs(data, tmp_path, refuses):
    bpe = data.text.bpe
    text = np.frombuffer(b"aaab" * 4 + b"cdcd" + b"aaaaa", np.uint8)
    pairs = bpe.learn(text, 258)
    assert pairs == [(97, 97), (256, 97)]  # "aa", and then "aaa"
    assert bpe.encode(text, pairs).tolist() == [257, 98] * 4 + [99, 100] * 2 + [256, 257]
    assert bpe.learn(np.arange(9, dtype=np.uint8), 300) == []  # no pair occurs twice
    texts = "to be or not to be, that is the question. " * 25, "être ou ne pas être, là est la question. " * 25
    for name, text in zip(("a.txt", "b.txt"), texts):
        (tmp_path / name).write_text(text, "utf-8")
    load = functools.partial(data.load, name="text", synthetic=False, files=f"{tmp_path}/*.txt", context=8)
    few, plain = load(tokens=280), load(tokens=256)
    text = lambda split: split.read(np.array([split.places.start]), len(split.places))[0]
    assert few.classes == 280 and 2 * len(few.train) < len(plain.train)
    spelled = [bytes([i]) for i in range(256)]
    for left, right in bpe.learn(text(plain.train), 280):  # from the training split alone
        spelled.append(spelled[left] + spelled[right])
    assert len(spelled) == 280 and text(few.train).max() == 279
    decoded = [b"".join(spelled[token] for token in text(split)) for split in (few.train, few.test)]
    assert decoded == [bytes(text(split).tolist()) for split in (plain.train, plain.test)]
    assert b"".join(decoded) == "".join(texts).encode()
    refuses(r"config\.data: expected from 256 to 4096 tokens, got 100", load, tokens=100)


def test_squad(data, tmp_path, refuses):
    """An answer is where it stands in the text, also behind letters of several bytes, or is left out behind the end."""
    options = dict(name="squad", synthetic=False, tokens=300)
    refuses("there is no .*train-v1.1.json: curl ", data.load, folder=str(tmp_path), length=40, **options)
    text = "Łódź is a city in the middle of Poland, and Łódź has a river."
    ask = lambda answer: {"question": "?", "answers": [{"text": answer, "answer_start": text.index(answer)}]}
    found = [{"paragraphs": [{"context": text, "qas": [ask("city"), ask("Łódź"), ask("river")]}]}]
    for name in data.squad.FILES:
        (tmp_path / name).write_text(json.dumps({"data": found}))
    train = data.load(folder=str(tmp_path), length=40, **options | dict(tokens=256)).train
    answers = [bytes(x[first : last + 1, 0].tolist()).decode() for x, (first, last) in zip(*every(train))]
    assert answers == ["city", "Łódź"]
    train, test = data.load(folder="", length=400, **options)[3:]
    assert len(train) > 5 * len(test) > 500
    for inputs, (first, last) in zip(*(x[:50] for x in every(test))):
        assert (inputs[[0, first, last], 1] == [data.squad.QUESTION, data.squad.TEXT, data.squad.TEXT]).all()


def test_scores_of_answers(train):
    """Exact match, and F1 of the tokens."""
    logits = jax.nn.one_hot(np.array([[2, 4], [2, 5], [7, 3]]), 9)
    found = importlib.import_module("models.bert").Bert.scores(logits, np.array([[2, 4], [4, 5], [1, 2]]))
    assert found["accuracy"].tolist() == [True, False, False]
    np.testing.assert_allclose(found["f1"], [1, 2 * 2 / (4 + 2), 0], rtol=1e-6)


def test_shares(data):
    """Processes have different parts of the same batch, wherever training began."""
    from data.split import tested, trained

    split = data.load(name="digits", synthetic=True).train
    whole = list(trained(split, 8, slice(0, 8), seed=0, start=0, stop=340))
    parts = [list(trained(split, 8, slice(4 * i, 4 * i + 4), seed=0, start=330, stop=340)) for i in range(2)]
    for (inputs, labels), (inputs0, labels0), (inputs1, labels1) in zip(whole[330:], *parts, strict=True):
        np.testing.assert_array_equal(inputs, [*inputs0, *inputs1])
        np.testing.assert_array_equal(labels, [*labels0, *labels1])
    first = np.concatenate([inputs for inputs, _ in whole[:168]])
    assert len(np.unique(first.reshape(len(first), -1), axis=0)) == len(first)  # an epoch has each example once
    weights = np.concatenate([weights for *_, weights in tested(split, 8, slice(2, 6), most=21)])
    np.testing.assert_array_equal(weights, [1] * 11 + [0])  # examples 2..5, 10..13, 18..20 of 21


def test_a_process_reads_only_its_share(data, tmp_path, monkeypatch, refuses):
    """Two processes read the bytes of one, each other ones. All have the same batches, also of text in many files."""
    from data.content import Content
    from data.split import trained

    digest = lambda content, kind: getattr(hashlib, kind)(content, usedforsecurity=False).hexdigest()
    content = cifar(tmp_path, data.cifar.Cifar100)
    with tarfile.open(tmp_path / data.cifar.Cifar100.archive) as archive:
        archive.extractall(tmp_path, filter="data")
    for part in "train", "test":
        monkeypatch.setattr(data.cifar.Cifar100, part, {f"{part}.bin": digest(content, "sha1")})
    for name in data.fashion_mnist.FILES:
        content = np.random.default_rng(0).bytes(16 + 784 * 6 if "images" in name else 8 + 6)
        (tmp_path / name).with_suffix("").write_bytes(content)
        monkeypatch.setitem(data.fashion_mnist.FILES, name, digest(content, "md5"))
    text = np.random.default_rng(1).bytes(2000)
    for i, (first, last) in enumerate(((0, 500), (500, 500), (500, 505), (505, 2000))):
        (tmp_path / f"{i}.txt").write_bytes(text[first:last])
    read, places = Content.read, []
    monkeypatch.setattr(Content, "read", lambda *args: places.append((id(args[0]), *args[1:])) or read(*args))
    folder = dict(synthetic=False, folder=str(tmp_path), augment=True)
    for name, options, reads in (
        ("cifar100", folder, 1),
        ("fashion_mnist", folder, 2),  # images and labels
        ("text", dict(synthetic=False, files=str(tmp_path / "*.txt"), context=16, tokens=256), 1),
    ):
        split, found, read_by = data.load(name=name, **options).train, [], []
        for share in slice(0, 4), slice(0, 2), slice(2, 4):
            places.clear()
            found.append(list(trained(split, 4, share, seed=0, start=0, stop=1)))
            read_by.append(sorted(places))
        whole, first, second = read_by
        assert sorted(first + second) == whole and len(first) == len(second) == len(set(whole)) / 2 == 2 * reads
        for arrays, *halves in zip(*(batches[0] for batches in found), strict=True):
            np.testing.assert_array_equal(arrays, np.concatenate(halves))
    starts = np.arange(1900)
    rows = split.read(starts, 100)
    np.testing.assert_array_equal(rows, np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(100)])
    (tmp_path / "3.txt").write_bytes(text[505:1000])
    refuses(r"3\.txt became shorter during the training", split.read, starts, 100)


def test_every_example_is_tested_once(run, train, data, monkeypatch):
    """This also holds if a batch has more examples than its equal parts."""
    counted, total = [], train.launch.World.total
    monkeypatch.setattr(train.launch.World, "total", lambda *args: counted.append(total(*args)) or counted[-1])
    changes = {"data": "digits", "train.batch_size": 64, "train.steps": 1, "train.test_examples": 0}
    run("digits/mlp", changes, devices=3)
    split = data.load(name="digits", synthetic=False).test
    assert sum(sums["examples"] for sums in counted) == len(split) and len(split) % 64
