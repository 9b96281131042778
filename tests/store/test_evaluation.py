"""The parameters where a model is evaluated, if its gradients are computed elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.algorithms.schedulefree import ScheduleFree
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout
from aiops.store.evaluation import Evaluation
from aiops.store.parameters import Store
from tests.rows import each_row

SHAPES = (("large", (70_000, 2)), ("small", (3,)), ("empty", (0,)), ("last", (5, 5)))
"""More than one block of elements, and less."""

LEFT = np.array([0.5, 0.25, 1.0, 0.0])


def trained(dtype: str) -> Store:
    """Return a store whose parameters and offset are random."""
    random = np.random.default_rng(7)
    layout = Layout([(name, dtype, shape) for name, shape in SHAPES])
    store = Store(layout, ScheduleFree().rule(), arena=Arena(layout))
    place = list(store.rule.state).index("o")
    arrays = {t.name: random.normal(size=t.shape).astype(t.dtype) for t in layout.tensors}
    store.set(arrays)
    store.state[0][place][:] = random.normal(size=len(store.state[0][place]))
    master = store.masters[0]
    if master is not None:  # further than its 16 bits tell
        master += (random.normal(size=len(master)) * 1e-3).astype(np.float32)
    return store


def wanted(store: Store) -> dict[str, Array]:
    """Return w − left · offset of each tensor, from the arrays as a whole."""
    section, [offsets] = store.layout.sections[0], [state[2] for state in store.state]
    master, found = store.masters[0], {}
    for tensor, left in zip(store.layout.tensors, LEFT, strict=True):
        first = (tensor.offset - section.start) // tensor.dtype.itemsize
        mine = slice(first, first + tensor.size)
        values = store.current.arena.sections[0][mine] if master is None else master[mine]
        exact = values - offsets[mine] * offsets.dtype.type(left)
        found[tensor.name] = exact.astype(tensor.dtype).reshape(tensor.shape)
    return found


@each_row("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_some_of_the_offset_is_left_out_of_each_tensor(dtype: str) -> None:
    store = trained(dtype)
    before = store.current.arena.data.copy()
    offsets = store.state[0][2].copy()
    evaluation = Evaluation(store)
    for found in (evaluation.now(LEFT), _made(evaluation)):
        for name, values in wanted(store).items():
            np.testing.assert_array_equal(found.views[name], values)
    np.testing.assert_array_equal(store.current.arena.data, before)
    np.testing.assert_array_equal(store.state[0][2], offsets)


def test_a_reader_keeps_the_version_that_it_reads() -> None:
    store = trained("float32")
    evaluation = Evaluation(store)
    first = _made(evaluation)
    lease = evaluation.lease()
    values = first.data.copy()
    store.state[0][2][:] = 0.0
    assert _made(evaluation) is not first
    np.testing.assert_array_equal(first.data, values)
    assert evaluation.owns(lease.version)
    lease.release()
    assert not evaluation.owns(lease.version)
    assert not evaluation.owns(store.current)


def test_the_next_version_is_written_in_place_if_none_reads_it() -> None:
    evaluation = Evaluation(trained("float32"))
    assert _made(evaluation) is _made(evaluation)


def test_its_number_is_that_of_the_model_while_it_may_be_sent() -> None:
    store = trained("float32")
    evaluation = Evaluation(store)
    assert evaluation.number == -1
    store.current.advance(7, store.layout.all)
    job = evaluation.begin(LEFT)
    assert evaluation.number == -1
    job.run()
    evaluation.publish(job)
    assert evaluation.number == 7
    assert evaluation.lease().version.tensor_versions.tolist() == [1, 1, 1, 1]
    evaluation.forget()
    assert evaluation.number == -1


def test_a_rule_without_an_offset_has_none() -> None:
    from aiops.algorithms.asgd import ASGD

    layout = Layout([("w", "float32", (3,))])
    with pytest.raises(AssertionError, match="evaluated where it is trained"):
        Evaluation(Store(layout, ASGD().rule()))


def _made(evaluation: Evaluation) -> Arena:
    job = evaluation.begin(LEFT)
    job.run()
    evaluation.publish(job)
    return job.target.arena
