from __future__ import annotations

import gzip
import hashlib
from importlib import resources

import numpy as np

from aiops.lab.workloads import MLP, batches, load


def test_the_shipped_file_is_the_uci_file_and_credits_say_whose_it_is() -> None:
    folder = resources.files("aiops.lab.workloads") / "data"
    content = gzip.decompress((folder / "optdigits.tes.gz").read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    assert digest == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    credits = (folder / "CREDITS.md").read_text(encoding="utf-8")
    for fact in ("Alpaydin", "Kaynak", "UCI", "CC BY 4.0", digest):
        assert fact in credits


def test_there_are_1797_images_and_every_digit_has_its_known_count() -> None:
    data = load("digits")
    assert (data.train_x.shape, data.test_x.shape) == ((1437, 8, 8), (360, 8, 8))
    assert data.train_x.dtype == np.float32
    assert data.train_y.dtype == np.int64
    counts = np.bincount(data.train_y) + np.bincount(data.test_y)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert set(np.unique(data.train_x * 16).tolist()) == set(range(17))


def test_the_split_gives_every_digit_its_fifth_and_never_changes() -> None:
    data = load("digits")
    assert np.bincount(data.test_y).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
    assert data.test_y[:12].tolist() == [0, 2, 4, 7, 1, 6, 8, 9, 5, 3, 0, 2]
    assert data.train_y[:12].tolist() == [1, 3, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_no_image_is_in_both_parts() -> None:
    data = load("digits").flat()
    train = {row.tobytes() for row in data.train_x}
    assert len(train) == 1437
    assert train.isdisjoint(row.tobytes() for row in data.test_x)


def test_plain_sgd_learns_to_read_them() -> None:
    data = load("digits").flat()
    model = MLP((data.features, 64, data.classes))
    params = model.init(seed=0)
    stream = batches(data, batch_size=16, seed=0)
    for _ in range(1500):
        _, grads = model.gradients(params, *next(stream))
        for name, grad in grads.items():
            params[name] -= 0.2 * grad
    assert model.accuracy(params, data.test_x, data.test_y) >= 0.95
