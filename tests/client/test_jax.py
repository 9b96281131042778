from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import aiops
from aiops.errors import BadPush, UsageError
from tests.support import ServerThread

jax = pytest.importorskip("jax")
jnp = jax.numpy

from aiops.client import jax as module_under_test  # noqa: E402
from aiops.client.jax import RemoteTree  # noqa: E402


@pytest.fixture
def asgd() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", lr=0.5, kernels="numpy") as server:
        yield server


def network() -> dict[str, Any]:
    key = jax.random.key(0)
    return {
        "hidden": {"kernel": jax.random.normal(key, (4, 3)) * 0.5, "bias": jnp.zeros(3)},
        "out": {"kernel": jnp.full((3, 1), 0.5)},
    }


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)


def fetched(server: ServerThread) -> dict[str, Any]:
    with aiops.Client(server.url) as client:
        return client.fetch().numpy()


class Layer(NamedTuple):
    w: Any
    wide: Any = None


@jax.tree_util.register_pytree_node_class
class Module:
    """A module as some libraries have them: a pytree that can be called."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return self.w * x

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Module:
        return cls(*children)


# ---------------------------------------------------------------- training


@pytest.mark.slow
def test_workers_share_a_data_set_that_is_in_jax_arrays(asgd: ServerThread) -> None:
    """Each step adds 1 at its examples' places; one worker leaves with a mini-batch unused."""
    numbers, params = jnp.arange(30), {"w": jnp.zeros((2, 30))}
    gradients = jax.jit(jax.grad(lambda params, epoch, batch: -2 * params["w"][epoch, batch].sum()))

    def train(steps: int) -> None:
        with RemoteTree(params, asgd.url) as remote:
            shared = aiops.data.batches(remote, numbers, batch_size=5, epochs=2, task_size=10)
            for taken, batch in enumerate(shared):
                if taken == steps:
                    break
                assert remote.step(gradients(remote.params, shared.epoch, batch)).used

    train(steps=7)
    assert fetched(asgd)["w"].sum() == 35
    train(steps=100)
    assert (fetched(asgd)["w"] == 1).all()


@pytest.mark.slow
def test_a_lone_worker_trains_as_sgd_does(asgd: ServerThread) -> None:
    x = jax.random.normal(jax.random.key(1), (16, 4))
    y = x.sum(axis=1, keepdims=True)
    gradient = jax.jit(jax.grad(loss_of))
    local = network()
    with RemoteTree(network(), asgd.url) as remote:
        for _ in range(5):
            receipt = remote.step(gradient(remote.params, x, y))
            local = jax.tree.map(lambda p, g: p - 0.5 * g, local, gradient(local, x, y))
        assert (receipt.version, remote.version, remote.last) == (5, 5, receipt)
        assert repr(remote).endswith("asgd, version 5>")
    assert jax.tree.structure(remote.params) == jax.tree.structure(local)
    for mine, theirs in zip(jax.tree.leaves(remote.params), jax.tree.leaves(local), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_params_change_no_jitted_signature(asgd: ServerThread) -> None:
    traced = []

    def ones(params: Any) -> Any:
        traced.append(1)
        return jax.tree.map(jnp.ones_like, params)

    gradient = jax.jit(ones)
    with RemoteTree(network(), asgd.url) as remote:
        gradient(remote.params)
        before = len(traced)
        for _ in range(3):
            remote.step(gradient(remote.params))
        assert len(traced) == before


@pytest.mark.parametrize("size", [1, 3, 1 << 16])
def test_older_parameters_stay_as_they_are(asgd: ServerThread, size: int) -> None:
    with RemoteTree({"w": jnp.ones(size)}, asgd.url) as remote:
        first = remote.params
        remote.step(jax.tree.map(jnp.ones_like, first))
        second = remote.params
        remote.step(jax.tree.map(jnp.ones_like, second))
        remote.refresh()
        for params, value in ((first, 1.0), (second, 0.5), (remote.params, 0.0)):
            assert set(np.asarray(params["w"]).tolist()) == {value}


def test_donated_parameters_do_no_harm(asgd: ServerThread) -> None:
    consuming = jax.jit(lambda params: jax.tree.map(lambda p: 2 * p, params), donate_argnums=0)
    with RemoteTree({"w": jnp.ones(64)}, asgd.url) as remote:
        gradients = consuming(remote.params)
        remote.step(gradients)
        assert float(remote.params["w"][0]) == 0.0
        assert float(remote.worker.params["w"][0]) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(asgd: ServerThread, dtype: str) -> None:
    with RemoteTree({"w": jnp.array([1.0, -2.0], dtype)}, asgd.url) as remote:
        remote.step({"w": jnp.array([0.5, 1.0], dtype)})
        assert remote.params["w"].dtype == dtype
        assert remote.params["w"].tolist() == [0.75, -2.5]
    assert fetched(asgd)["w"].dtype.name == dtype


def test_float64_is_what_jax_makes_of_it(asgd: ServerThread) -> None:
    tree = {"w": np.array([1.0, 2.0])}
    with RemoteTree(tree, asgd.url) as remote:
        assert remote.params["w"].dtype == np.float32
    with (
        jax.enable_x64(True),
        ServerThread(policy="asgd", lr=0.5, kernels="numpy") as server,
        RemoteTree(tree, server.url) as remote,
    ):
        remote.step({"w": np.array([1.0, 1.0])})
        assert remote.params["w"].dtype == np.float64
        assert remote.params["w"].tolist() == [0.5, 1.5]


def test_arrays_bound_to_a_device_stay_bound_to_it(asgd: ServerThread) -> None:
    device = jax.devices()[0]
    tree = {"bound": jax.device_put(jnp.ones(2), device), "free": jnp.ones(2)}
    with RemoteTree(tree, asgd.url) as remote:
        remote.step(jax.tree.map(jnp.ones_like, tree))
        assert (remote.params["bound"].committed, remote.params["free"].committed) == (True, False)
        assert remote.params["bound"].sharding == tree["bound"].sharding


def test_a_numpy_worker_trains_the_same_model(asgd: ServerThread) -> None:
    tree = {"layer0": {"bias": jnp.zeros(2), "weight": jnp.ones((3, 2))}}
    arrays = {"layer0.bias": np.ones(2, np.float32), "layer0.weight": np.ones((3, 2), np.float32)}
    with RemoteTree(tree, asgd.url) as remote, aiops.Worker(asgd.url, arrays) as worker:
        assert worker.params["layer0.bias"].tolist() == [0.0, 0.0]
        worker.step({"layer0.bias": np.ones(2, np.float32)})
        assert remote.refresh() == 1
        assert remote.params["layer0"]["bias"].tolist() == [-0.5, -0.5]


# ---------------------------------------------------------------- functions


def test_a_function_computes_the_gradients(asgd: ServerThread) -> None:
    with RemoteTree({"w": jnp.array(3.0)}, asgd.url) as remote:
        remote.step(jax.grad(lambda params: params["w"] ** 2))
        assert float(remote.params["w"]) == 0.0


def test_a_refused_gradient_is_recomputed_on_newer_parameters() -> None:
    settings = {"lr": 0.5, "admission": "reject"}
    seen: list[float] = []

    def gradients(params: Any) -> Any:
        seen.append(float(params["w"]))
        return params

    tree = {"w": jnp.array(4.0)}
    with (
        ServerThread(policy="hardsync", set=settings, workers=1, kernels="numpy") as server,
        RemoteTree(tree, server.url) as a,
        RemoteTree(tree, server.url) as b,
    ):
        b.step(gradients)
        a.step(gradients)
        assert seen == [4.0, 4.0, 2.0]
        assert (a.worker.recomputed, a.version, float(a.params["w"])) == (1, 2, 1.0)
        with pytest.raises(UsageError, match=r"hardsync may ask .* step\(function\)"):
            a.step({"w": jnp.array(1.0)})


# ---------------------------------------------------------------- structures


def test_names_are_paths(asgd: ServerThread) -> None:
    w = jnp.ones(1)
    tree = {"a": [w, (w, w)], "b": Layer(w, wide={3: w}), "c": Module(w)}
    with RemoteTree(tree, asgd.url) as remote:
        assert list(fetched(asgd)) == ["a.0", "a.1.0", "a.1.1", "b.w", "b.wide.3", "c.0"]
        remote.step(tree)
        assert remote.params["b"].wide[3].tolist() == [0.5]
        assert isinstance(remote.params["c"], Module)


def test_a_tree_may_be_one_array_or_a_callable_module(asgd: ServerThread) -> None:
    with RemoteTree(jnp.array([1.0]), asgd.url) as remote:
        remote.step(jnp.array([1.0]))
        assert remote.params.tolist() == [0.5]
    assert list(fetched(asgd)) == ["params"]
    with (
        ServerThread(policy="asgd", lr=0.5, kernels="numpy") as server,
        RemoteTree(Module(jnp.array([1.0])), server.url) as remote,
    ):
        remote.step(Module(jnp.array([1.0])))  # gradients, though one could call them
        assert remote.params(2.0).tolist() == [1.0]


def test_none_means_no_gradient(asgd: ServerThread) -> None:
    one = jnp.ones(1)
    tree = {"a": one, "b": {"x": one, "y": None}, "bb": one}
    with RemoteTree(tree, asgd.url) as remote:
        assert list(fetched(asgd)) == ["a", "b.x", "bb"]
        remote.step({"a": one, "b": {"x": None, "y": None}, "bb": one})
        assert [leaf.item() for leaf in jax.tree.leaves(remote.params)] == [0.5, 1.0, 0.5]
        remote.step({"a": None, "b": None, "bb": one})
        assert [leaf.item() for leaf in jax.tree.leaves(remote.params)] == [0.5, 1.0, 0.0]
        assert remote.params["b"]["y"] is None
        for nothing in ({"a": None, "b": {"x": None, "y": None}, "bb": None}, None):
            with pytest.raises(UsageError, match="all gradients are None"):
                remote.step(nothing)
        assert remote.version == 2


one = np.ones(1, np.float32)
mismatches = {
    "missing": ({"a": {"x": one}}, r"nothing at \['a'\]\['y'\], but params do"),
    "misspelt": (
        {"a": {"x": one, "Y": one}},
        r"nothing at \['a'\]\['y'\].*mean \"\['a'\]\['Y'\]\"",
    ),
    "too many": ({"a": {"x": one, "y": one}, "b": one}, r"have \['b'\], but params do not"),
    "alike": ({"a": {"x": one}}, r"nothing at .*, but params do; None says that it has no"),
    "flat": ({"a": one}, r"nothing at \['a'\]\['x'\]"),
    "none below": ({"a": {"x": one, "y": one}, "c": {"d": None, "e": one}}, r"\['c'\]\['e'\]"),
    "shape": ({"a": {"x": one, "y": np.ones(2, np.float32)}}, r"'a.y'.*shape \(2,\).*\(1,\)"),
    "dtype": ({"a": {"x": one, "y": np.ones(1, np.float16)}}, r"'a.y'.*is float16.*float32"),
}


@pytest.mark.parametrize("which", mismatches)
def test_gradients_of_another_structure_are_refused_by_path(asgd: ServerThread, which: str) -> None:
    gradients, text = mismatches[which]
    with RemoteTree({"a": {"x": one, "y": one}}, asgd.url) as remote:
        with pytest.raises(UsageError, match=text):
            remote.step(gradients)
        remote.step({"a": {"x": one, "y": one}})
        assert remote.version == 1


def test_a_gradient_that_is_not_finite_is_refused_by_name(asgd: ServerThread) -> None:
    with RemoteTree({"a": {"x": one}}, asgd.url) as remote:
        with pytest.raises(BadPush, match=r"'a\.x' holds nan"):
            remote.step({"a": {"x": jnp.array([jnp.nan])}})
        assert (remote.params["a"]["x"].tolist(), remote.version) == ([1.0], 0)


def test_a_step_inside_of_jit_is_refused(asgd: ServerThread) -> None:
    with RemoteTree({"w": one}, asgd.url) as remote:
        with pytest.raises(UsageError, match="keep it out of jit"):
            jax.jit(remote.step)({"w": one})
        assert remote.version == 0


refused = {
    "nothing": ({}, "the tree has no array"),
    "a number": ({"a": {"lr": 0.1}}, r"\['a'\]\['lr'\] is a float, not an array"),
    "integers": ({"step": jnp.array(3)}, r"\['step'\] is int32, which cannot be trained"),
    "a key": ({"rng": jax.random.key(0)}, r"\['rng'\] is key<fry>"),
    "complex": (jnp.array([1j]), "the tree is complex64"),
    "float8": ({"w": np.ones(1, ml_dtypes.float8_e4m3fn)}, r"\['w'\] is float8_e4m3fn"),
    "one name": ({"a": {"b": one}, "a.b": one}, r"\['a'\]\['b'\] and \['a.b'\] .* called 'a.b'"),
}


@pytest.mark.parametrize("which", refused)
def test_what_cannot_be_trained_is_refused_before_anything_is_sent(which: str) -> None:
    tree, text = refused[which]
    with pytest.raises(UsageError, match=text):
        RemoteTree(tree, "aiops://127.0.0.1:1")


# ---------------------------------------------------------------- the end


def test_closing_pushes_the_last_steps_and_takes_over_the_model() -> None:
    settings = {"inner_lr": 0.02, "local_steps": 2}
    with ServerThread(policy="diloco", set=settings, workers=1, kernels="numpy") as server:
        remote = RemoteTree({"w": jnp.ones(3)}, server.url)
        for _ in range(3):
            remote.step({"w": jnp.ones(3)})
        remote.close()
        with aiops.Client(server.url) as client:
            theirs = client.fetch()
        assert theirs.version == 2
        np.testing.assert_array_equal(theirs["w"], remote.params["w"])


def test_after_closing_the_model_is_where_it_is_evaluated() -> None:
    settings = {"schedule": "constant"}
    with ServerThread(policy="schedule-free", set=settings, kernels="numpy") as server:
        remote = RemoteTree({"w": jnp.ones(3)}, server.url)
        for _ in range(5):
            remote.step({"w": jnp.ones(3)})
        trained, evaluated = remote.params["w"], remote.evaluation()["w"]
        assert remote.params["w"] is trained
        last = remote.close()
        assert (evaluated != trained).all()
        np.testing.assert_array_equal(last["w"], evaluated)
        assert remote.params is last


def test_closing(asgd: ServerThread) -> None:
    with RemoteTree({"w": one}, asgd.url) as remote:
        pass
    remote.close()
    with pytest.raises(UsageError, match="closed"):
        remote.step({"w": one})


def test_a_tree_nobody_refers_to_says_goodbye(asgd: ServerThread) -> None:
    remote = RemoteTree({"w": one}, asgd.url)
    remote.step(lambda params: params)
    worker = remote.worker
    del remote
    gc.collect()
    with pytest.raises(UsageError, match="closed"):
        worker.step({"w": one})


def test_without_jax_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "aiops.client.jax")
    monkeypatch.setattr(aiops.client, "jax", module_under_test)  # and put it back afterwards
    with pytest.raises(ImportError, match=re.escape("pip install 'aiops-ps[jax]'")):
        importlib.import_module("aiops.client.jax")


class TestTables:
    """Rows that a mini-batch names, and their gradients."""

    IDS = np.array([[1, 5, 5], [99, 1, 7]])

    @staticmethod
    def loss(params: Any, rows: Any, index: Any) -> Any:
        return ((rows[index] @ params["w"]).mean(axis=1) ** 2).sum()

    def test_they_train_as_a_dense_embedding_does(self, asgd: ServerThread) -> None:
        """With two workers that take turns."""
        tables = {"words": aiops.Table(100, 4, scale=0.5, seed=3)}
        start, rng = {"w": jnp.linspace(0.5, 1.0, 4)}, np.random.default_rng(2)
        traced = []

        def of(params: Any, rows: Any, index: Any) -> Any:
            traced.append(rows.shape)
            return self.loss(params, rows, index)

        grad = jax.jit(jax.grad(of, argnums=(0, 1)))
        with (
            RemoteTree(start, asgd.url, tables=tables) as one,
            RemoteTree(start, asgd.url, tables=tables) as two,
        ):
            weights, w = jnp.asarray(one.worker.fetch_rows("words", np.arange(100))), start["w"]
            for turn in range(6):
                ids, remote = rng.integers(0, 20, (2, 3)), (one, two)[turn % 2]
                remote.refresh()
                words = remote.lookup("words", ids)
                gradients, of_rows = grad(remote.params, words.rows, words.index)
                remote.step(gradients, rows=[(words, of_rows)])
                by_w, by_weights = jax.grad(self.loss, argnums=(0, 1))({"w": w}, weights, ids)
                w, weights = w - 0.5 * by_w["w"], weights - 0.5 * by_weights
            after = one.worker.fetch_rows("words", np.arange(100))
            np.testing.assert_allclose(after, weights, rtol=1e-5, atol=1e-6)
            one.refresh()
            np.testing.assert_allclose(one.params["w"], w, rtol=1e-5)
        assert traced == [(6, 4)], "one shape, so it was compiled once"

    def test_what_is_looked_up(self, asgd: ServerThread) -> None:
        tables = {"words": aiops.Table(100, 4)}
        with RemoteTree({"w": jnp.ones(4)}, asgd.url, tables=tables) as remote:
            words = remote.lookup("words", self.IDS)
            assert words.ids.tolist() == [1, 5, 7, 99]
            all_rows = remote.worker.fetch_rows("words", np.arange(100))
            np.testing.assert_array_equal(words.rows[words.index], all_rows[self.IDS])
            assert not words.rows[4:].any()
            with pytest.raises(UsageError, match="no table 'word'; did you mean 'words'"):
                remote.lookup("word", [1])
            with pytest.raises(UsageError, match="has no row 100"):
                remote.lookup("words", [100])
            with pytest.raises(UsageError, match="cannot be traced"):
                jax.jit(lambda ids: remote.lookup("words", ids).rows)(self.IDS)
            gradients = {"w": jnp.ones(4)}
            with pytest.raises(UsageError, match=r"shape \(2, 4\), but the rows"):
                remote.step(gradients, rows=[(words, jnp.ones((2, 4)))])
            with pytest.raises(UsageError, match="has no gradients of rows"):
                remote.step(lambda params: gradients, rows=[(words, words.rows)])
            assert remote.version == 0
