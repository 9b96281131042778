"""Hugging Face's Trainer, Accelerate, Lightning and Keras train through a RemoteOptimizer.

They take seconds to import, so each has one test of the whole way of a job: begun, saved, and gone
on with, at the same server and at a new one; and then of its example.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from examples.frameworks import __main__ as frameworks
from tests.support import PATIENCE, Process, ServerThread
from tests.zygote import IMPORTED, NESTED

torch = pytest.importorskip("torch")

from aiops.client.torch import RemoteOptimizer, fetch_into, standalone  # noqa: E402
from aiops.errors import UsageError  # noqa: E402
from aiops.lab.workloads import Dataset  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # they warn of much

EXAMPLES = sorted(frameworks.HERE.glob("[!_]*.py"))


@pytest.fixture(autouse=True)
def _as_a_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The variables of ``aiops run --workers 2``, which `standalone` changes."""
    before, threads = dict(os.environ), torch.get_num_threads()
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(place)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


def on(server: ServerThread, model: Any, *, closed: bool = True) -> bool:
    """Return whether a model has the server's parameters; ``closed``: where it is evaluated."""
    with aiops.Client(server.url) as client:
        theirs = client.fetch(evaluation=closed)
    own = dict(model.named_parameters())
    trained = [p for p in own.values() if p.requires_grad]
    arrays = [theirs[name] for name in theirs]
    return len(arrays) == len(trained) and all(
        any(np.array_equal(p.detach().numpy(), array) for p in trained) for array in arrays
    )


def example_learns(name: str, amount: str, value: int, updates: int, most: float) -> None:
    """Run an example shortened, at a server of its own; it costs ``most`` at most then."""
    module = importlib.import_module(f"examples.frameworks.{name}")
    before = getattr(module, amount)
    setattr(module, amount, value)
    with ServerThread(policy="schedule-free", kernels="numpy") as server:
        os.environ["AIOPS_URL"] = server.url
        cost = module.main()
        with aiops.Client(server.url) as client:
            assert client.fetch().version == updates
    setattr(module, amount, before)
    assert 0 <= cost < most


def test_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert standalone() == (1, 2)
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **shape)
    words = [[(at + step) % 16 for step in range(8)] for at in range(64)]
    data = [{"input_ids": each, "labels": each} for each in words]

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            weight_decay=0.01,
            bf16=True,
            use_cpu=True,
            logging_steps=1,
            warmup_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
        )
        assert arguments.world_size == 1
        return transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            arguments,
            train_dataset=data,
            eval_dataset=data[:8],
            optimizer_cls_and_kwargs=(RemoteOptimizer, {}),
        )

    def logged(job: Any, what: str) -> list[float]:
        return [entry[what] for entry in job.state.log_history if what in entry]

    settings = {"weight_decay": ["0.01", "0@group1.*"]}
    with ServerThread(policy="schedule-free", set=settings, kernels="numpy") as server:
        os.environ["AIOPS_URL"] = server.url
        job = trainer(4)
        job.train()
        lr = job.optimizer.optimizer.server_lr
        rates = [0, lr / 2, lr, lr / 2]  # each step's; linear, with a warm-up of two steps
        assert logged(job, "learning_rate") == pytest.approx(rates)
        assert len(logged(job, "eval_loss")) == 2
        assert job.optimizer.optimizer.version == 4  # an accumulated gradient is one push
        assert on(server, job.model, closed=False)
        assert job.model.lm_head.weight is job.model.transformer.wte.weight
        job.optimizer.optimizer.close()
        assert on(server, job.model)

        more = trainer(6)  # at the same server: its model, and the schedule from where it was
        more.train(resume_from_checkpoint=True)
        assert more.state.global_step == 6
        assert more.optimizer.optimizer.version == 6
        assert logged(more, "learning_rate")[-1] == pytest.approx(lr / 4)
        kept = [param.clone() for param in more.model.parameters()]  # by the checkpoint, too
        more.optimizer.optimizer.close()
    with ServerThread(policy="schedule-free", set=settings, kernels="numpy") as server:
        os.environ["AIOPS_URL"] = server.url
        resumed = trainer(
            6
        )  # at a new one: the checkpoint's; the Trainer takes a step at a rate of 0
        resumed.train(resume_from_checkpoint=True)
        assert resumed.optimizer.optimizer.version == 1
        assert on(server, resumed.model, closed=False)
        assert "another one" not in caplog.text
        for one, other in zip(resumed.model.parameters(), kept, strict=True):
            assert torch.equal(one, other)
        resumed.optimizer.optimizer.close()
    example_learns("huggingface_trainer", "STEPS", 15, 15, 5.2)  # untrained: 5.5


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # by PEFT
def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # a Trainer before may have chosen a GPU
    standalone()

    def job() -> tuple[Any, ...]:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        assert accelerator.distributed_type == accelerate.DistributedType.NO
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        remote = RemoteOptimizer(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(remote, 0.5)
        return accelerator, remote, *accelerator.prepare(model, remote, scheduler)

    def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        for _ in range(4):
            x = torch.randn(8, 4)
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    with ServerThread(policy="fasgd", kernels="numpy") as server:
        os.environ["AIOPS_URL"] = server.url
        accelerator, remote, model, optimizer, scheduler = job()
        train(accelerator, model, optimizer, scheduler)
        assert remote.version == 2
        rate = remote.param_groups[0]["lr"]
        assert rate == remote.server_lr / 4
        assert on(server, model)
        accelerator.save_state(str(tmp_path))
        remote.close()
        accelerator, remote, *parts = job()
        accelerator.load_state(str(tmp_path))
        assert remote.param_groups[0]["lr"] == rate
        train(accelerator, *parts)
        assert remote.version == 4
        assert on(server, parts[0])
        remote.close()
    example_learns("accelerate_loop", "STEPS", 20, 20, 3.26)  # not fine-tuned: 3.288


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

        def training_step(self, batch: Any, number: int) -> Any:
            return (self.net(batch[0]).sum(dim=1) - batch[0].sum(dim=1)).square().mean()

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("cost", self.training_step(batch, number))

        def configure_optimizers(self) -> Any:
            optimizer = RemoteOptimizer(self)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), 4)

    def fit(steps: int, checkpoint: str | None = None) -> tuple[Any, Any]:
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            max_steps=steps,
            max_epochs=-1,
            devices=1,
            accelerator="cpu",
            precision="bf16-mixed",
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module, data, data, ckpt_path=checkpoint)
        return trainer, module

    for policy in ("schedule-free", "diloco"):
        settings = {"inner_lr": 0.02, "local_steps": 2} if policy == "diloco" else {}
        chosen: dict[str, Any] = {
            "policy": policy,
            "set": settings,
            "workers": 1,
            "kernels": "numpy",
        }
        with ServerThread(**chosen) as server:
            os.environ["AIOPS_URL"] = server.url
            trainer, module = fit(4)
            optimizer = trainer.optimizers[0]
            assert optimizer.worker.traffic
            assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.server_lr / 5)
            assert optimizer.version == (2 if policy == "diloco" else 4)
            assert "cost" in trainer.callback_metrics
            optimizer.close()
            assert on(server, module)
            saved = str(tmp_path / "saved.ckpt")
            trainer.save_checkpoint(saved)
            trainer, module = fit(8, saved)
            optimizer = trainer.optimizers[0]
            assert (trainer.global_step, optimizer.version) == (8, 4 if policy == "diloco" else 8)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.server_lr / 9)
            trainer.save_checkpoint(saved)
            kept = {name: value.clone() for name, value in module.named_parameters()}
            optimizer.close()
        with ServerThread(**chosen) as server:
            os.environ["AIOPS_URL"] = server.url
            trainer, resumed = fit(
                8, saved
            )  # no step is left: what defined the model is the checkpoint
            assert trainer.optimizers[0].version == 0
            elsewhere = Module()
            fetch_into(elsewhere, server.url)
            for name, value in kept.items():
                assert torch.equal(value, elsewhere.get_parameter(name))
            assert torch.equal(resumed.net[1].running_mean, module.net[1].running_mean)
            trainer.optimizers[0].close()
    example_learns("lightning_digits", "STEPS", 40, 40, 0.5)  # untrained: 0.9


@pytest.fixture
def keras() -> Any:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    return keras


def rates_of_keras(keras: Any) -> None:
    """The rate of a step is the server's for these tensors, or that which was set last."""
    from aiops.client.keras import KerasOptimizer

    def trained(optimizer: Any) -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        small = np.full((8, 4), 0.01, np.float32)  # so that the scaled gradient is finite
        model.fit(small, small[:, 0], batch_size=8, verbose=0)
        return model

    def factor(optimizer: Any) -> float:
        [only] = set((optimizer.remote._factors() or {"all": 1.0}).values())
        return float(only)

    with ServerThread(policy="asgd", set={"lr": ["0.1", "0.01@*"]}, kernels="numpy") as server:
        optimizer = KerasOptimizer(server.url)  # all tensors have a rate that is not the server's
        trained(optimizer)
        assert float(optimizer.learning_rate) == pytest.approx(0.01)
        assert factor(optimizer) == 1.0
        optimizer.close()
        optimizer = KerasOptimizer(server.url)
        optimizer.learning_rate = 0.005  # before it has joined
        trained(optimizer)
        assert float(optimizer.learning_rate) == pytest.approx(0.005)
        assert factor(optimizer) == pytest.approx(0.5)
        optimizer.close()
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            optimizer = KerasOptimizer(server.url)
            model = trained(optimizer)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        assert model.optimizer is not optimizer  # Keras has wrapped it
        assert optimizer.remote is not None
        assert optimizer.remote.version == 3
        assert factor(optimizer) == 1.0
        optimizer.close()


def restored_by_a_callback(keras: Any, folder: Path) -> None:
    """Keras restores a backup when fit() has joined: no step may undo it unseen."""
    from aiops.client.keras import KerasOptimizer

    seen, y = np.ones((8, 4), np.float32), np.ones(8)

    def job(url: str) -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(KerasOptimizer(url), "mse")
        return model

    def fit(model: Any, epochs: int) -> None:
        backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
        model.fit(seen, y, epochs=epochs, batch_size=8, verbose=0, callbacks=[backup])

    with ServerThread(policy="asgd", kernels="numpy") as server:
        first = job(server.url)
        fit(first, 1)
        first.optimizer.close()
        again = job(server.url)  # the same server has gone on, and its model counts
        fit(again, 2)
        assert again.optimizer.remote.version == 2
        again.optimizer.close()
    with ServerThread(policy="asgd", kernels="numpy") as server:
        resumed = job(server.url)
        with pytest.raises(UsageError, match=r"load the checkpoint before fit\(\)"):
            fit(resumed, 3)
        resumed.optimizer.close()


def test_keras(keras: Any, tmp_path: Path) -> None:
    from aiops.client.keras import KerasOptimizer

    layers, seen = keras.layers, np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)

    def job(optimizer: Any, **options: Any) -> Any:
        parts = [layers.Dense(3), layers.BatchNormalization(), layers.Dense(1, **options)]
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile(optimizer, "mse")
        return model

    def rate(epoch: int, before: float) -> float:
        return before / 2 if epoch else before

    halved = keras.callbacks.LearningRateScheduler(rate)
    fit = {"y": seen.sum(axis=1), "batch_size": 8, "verbose": 0, "callbacks": [halved]}
    with ServerThread(policy="asgd", lr=0.1, kernels="numpy") as server:
        optimizer = KerasOptimizer(server.url, global_clipnorm=0.5, gradient_accumulation_steps=2)
        model = job(optimizer)
        cost = model.fit(seen, epochs=3, **fit).history["loss"]
        assert optimizer.remote is not None
        lr = optimizer.remote.server_lr
        assert cost[-1] < cost[0]
        assert optimizer.remote.version == 6  # of 12 mini-batches
        assert float(optimizer.learning_rate) == pytest.approx(lr / 4)
        assert optimizer.remote.param_groups[0]["lr"] == pytest.approx(lr / 4)
        optimizer.close()
        with aiops.Client(server.url) as client:
            theirs = client.fetch()
        names = ["0.kernel", "1.bias", "2.gamma", "3.beta", "4.kernel", "5.bias"]
        assert list(theirs) == names
        for name, variable in zip(names, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(theirs[name], variable.numpy())
        model.save_weights(tmp_path / "saved.weights.h5")
    with ServerThread(policy="fasgd", kernels="numpy") as server:
        resumed = job(KerasOptimizer(server.url, learning_rate=0.0))  # the weights define the model
        resumed.load_weights(tmp_path / "saved.weights.h5", skip_mismatch=False)
        resumed.fit(seen, **fit)
        assert resumed.optimizer.remote.version == 4
        for one, two in zip(resumed.trainable_variables, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy())
        resumed.optimizer.close()
    with pytest.raises(UsageError, match=r"start it with --set weight_decay=0.1"):
        KerasOptimizer(weight_decay=0.1)
    with pytest.raises(UsageError, match="use_ema overwrites variables"):
        KerasOptimizer(use_ema=True, ema_overwrite_frequency=2)
    bound = job(KerasOptimizer("aiops://127.0.0.1:1"), kernel_constraint="non_neg")
    with pytest.raises(UsageError, match=r"kernel' has a constraint, which the server cannot keep"):
        bound.fit(seen, **fit)
    rates_of_keras(keras)
    restored_by_a_callback(keras, tmp_path / "backup")
    example_learns("keras_digits", "EPOCHS", 1, 45, 0.5)


def test_flax() -> None:
    pytest.importorskip("flax")
    optax = pytest.importorskip("optax")
    from aiops.client.jax import RemoteTree

    page = (Path(__file__).parents[2] / "docs" / "frameworks" / "flax.md").read_text("utf-8")
    told = re.search(r"`step\(\.\.\., lr_factor=(.*?)\)`, `peak` being its largest rate", page)
    assert told is not None
    peak = 0.01
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, 2, 10)  # a warm-up from 0
    with ServerThread(policy="asgd", lr=1.0, kernels="numpy") as server:
        remote = RemoteTree({"w": np.ones(3, np.float32)}, server.url)
        seen = []
        for n in range(4):
            factor = eval(told[1], {"schedule": schedule, "n": n, "peak": peak})
            before = remote.params["w"]
            remote.step({"w": np.ones(3, np.float32) / 10}, lr_factor=factor)
            seen.append(float(10 * (before - remote.params["w"])[0]))
        remote.close()
    assert seen[:3] == pytest.approx([0.0, 0.5, 1.0], abs=1e-5)
    assert 0 < seen[3] < 1
    example_learns("flax_digits", "STEPS", 40, 40, 0.5)


def test_a_plain_loop_of_a_residual_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On images whose class is their colour: CIFAR-10 takes long to read."""
    import examples.frameworks.pytorch_resnet as example

    drawn = np.random.default_rng(0)

    def images(count: int) -> tuple[Any, Any]:
        labels = drawn.integers(0, 3, count)
        pixels = drawn.random((count, 32, 32, 3), np.float32) / 2
        pixels[np.arange(count), :, :, labels] += 0.5
        return pixels, labels

    dataset = Dataset("colours", *images(200), *images(60), classes=10)
    monkeypatch.setattr(example, "load", lambda name: dataset)
    example_learns("pytorch_resnet", "STEPS", 15, 15, 0.4)  # untrained: 0.67 and more


def test_a_plain_loop_of_a_recommender() -> None:
    example_learns("pytorch_dlrm", "STEPS", 50, 50, 0.65)  # untrained: 0.69


def test_workers_of_aiops_run_are_not_joined_by_the_framework() -> None:
    """Two real processes, whose Accelerator finds RANK and WORLD_SIZE."""
    pytest.importorskip("accelerate")
    command = (
        "run",
        "--workers",
        "2",
        "--kernels",
        "numpy",
        "examples/frameworks/accelerate_loop.py",
    )
    forked = {NESTED: "1", IMPORTED: "torch,accelerate"}
    process = Process("-m", "aiops", *command, env={"STEPS": "3", **forked})
    try:
        status, out, err = process.end(4 * PATIENCE)
    finally:
        process.kill()
    assert status == 0, err
    assert len(re.findall(r"^\[[01]\] [\d.]+ nats per byte of source", out, re.MULTILINE)) == 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_five_lines_of_aiops(example: Path) -> None:
    """And without them it is a program, with nothing of aiops but the data."""
    text = example.read_text("utf-8")
    assert 1 <= len(frameworks.marked(text)) <= 5
    alone = frameworks.alone(text)
    compile(alone, str(example), "exec")
    code = alone.split('"""', 2)[2]
    assert not re.search("Remote|KerasOptimizer", code)
    assert "standalone" not in code
    assert "aiops.client" not in code
