"""The recipes of docs/trainers.md, run as they stand there with the real packages, in float16 on a CPU; and others."""

import copy
import dataclasses
import functools
import shutil
import sys
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import LightningModule
from transformers import TrainingArguments

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.errors import CallOrderError
from lossscale_core.testing import check_policy
from lossscale_torch import GradScaler
from tests.adapters.pages import code_of

pytestmark = pytest.mark.filterwarnings("default")  # what these packages warn of is theirs
PAGE = "docs/trainers.md"
INF = float("inf")
OVERFLOWS = {0, 2, 5}
STEPS = 8
ON_A_CPU = {
    '"cuda"': '"cpu"',
    'Accelerator(mixed_precision="fp16")': "in_float16(Accelerator(cpu=True))",
    "trainer.accelerator.scaler": "in_float16(trainer.accelerator).scaler",
}
"""What stands in the place of what only a GPU has."""
RESUMABLE = {'policy="dynamic"': "policy=POLICY, guard=SpikeGuard(warmup=2)"}
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=2, hysteresis=2)
BAD = {1: INF, 5: 1000.0, 9: INF, 13: 1000.0}
"""By what the gradients of some of 16 steps are multiplied; the run is saved after half of them."""


def _recipe(heading, replaced=None):
    source = code_of(PAGE, heading)
    for name, value in {**ON_A_CPU, **(replaced or {})}.items():
        source = source.replace(name, value)
    return compile(source, f"{PAGE}, {heading}", "exec")


def _run(heading, names, replaced=None):
    """Run a recipe with these names, and return all names."""
    names = {"torch": torch, "in_float16": in_float16, "POLICY": POLICY, "SpikeGuard": SpikeGuard, **names}
    exec(_recipe(heading, replaced), names)
    return names


def in_float16(accelerator):
    """Set what Accelerate sets with `mixed_precision="fp16"`, which it refuses on a CPU; autocast takes it there."""
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


@pytest.fixture(autouse=True)
def accelerate_afresh():
    """Forget the precision and the accumulation of an Accelerator, which all of a process share."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _data(steps=STEPS):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(steps)]


def _loss_fn(outputs, targets):
    return (outputs.float() - targets).square().mean()


class _Model(torch.nn.Module):
    """A linear layer in float16, with bad gradients in some of its backward passes; it notes its weights."""

    def __init__(self, bad=OVERFLOWS, first=0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.bad = bad if isinstance(bad, dict) else dict.fromkeys(bad, INF)
        self.first = first
        self.weights = []
        self.layer.weight.register_hook(self._spoil)

    def _spoil(self, grad):
        self.weights.append(self.layer.weight.detach().clone())
        return grad * self.bad.get(self.first + len(self.weights) - 1, 1.0)

    def forward(self, inputs):
        with torch.autocast("cpu", torch.float16):
            return self.layer(inputs)

    def skipped(self):
        """Return the steps after which the weight was as before."""
        weights = [*self.weights, self.layer.weight.detach()]
        return {step for step in range(len(weights) - 1) if torch.equal(weights[step], weights[step + 1])}


class _ModelWithLoss(_Model):
    """The same, with its loss, as a model of transformers has it."""

    def forward(self, inputs, labels):
        return {"loss": _loss_fn(super().forward(inputs), labels)}


def _optimizer_of(model, fused=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _arguments(folder, kind=TrainingArguments, **settings):
    return kind(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, report_to=[],
        logging_strategy="no", disable_tqdm=True, seed=0, **{"save_strategy": "no", **settings},
    )  # fmt: skip


def _rows(steps=STEPS):
    """Return single rows of data by name, as transformers' collator takes them."""
    return [{"inputs": x, "labels": y} for inputs, labels in _data(steps) for x, y in zip(inputs, labels, strict=True)]


def _small_language_model():
    """Return a language model of five words, and its tokenizer, made without any download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<pad>", "<eos>", "a", "b", "c"))}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_trl(optim, tmp_path):
    """Supervised fine-tuning skips an overflow, and its schedule follows applied steps."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = _small_language_model()
    norm, seen = model.model.norm, []

    def spoil(grad):
        seen.append(norm.weight.tolist())
        return grad * (INF if len(seen) == 2 else 1.0)

    norm.weight.register_hook(spoil)
    args = _arguments(tmp_path, SFTConfig, bf16=False, max_length=8, learning_rate=0.1, optim=optim)
    dataset = Dataset.from_list([{"text": "a b c a"}] * 32)  # four batches
    names = {"model": model, "args": args, "dataset": dataset, "tokenizer": tokenizer, "SFTTrainer": SFTTrainer}
    replaced = {" Trainer(model, args,": " SFTTrainer(model, args, processing_class=tokenizer,"}
    names = _run("Hugging Face Trainer, TRL", names, replaced)
    changed = [before != after for before, after in pairwise([*seen, norm.weight.tolist()])]
    assert changed == [True, False, True, True]
    assert names["trainer"].lr_scheduler.last_epoch == 3
    assert names["trainer"].accelerator.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fused", [False, True])
def test_attempts_around_accelerate(fused):
    """Its engine in the body, with both micro-batches of an accumulation; a body of one is refused."""
    accelerator = in_float16(Accelerator(cpu=True, gradient_accumulation_steps=2))
    accelerator.scaler = scaler = GradScaler("cpu", init_scale=2.0**30, growth_interval=10**6)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))

    def step(micro_batches):
        for attempt in scaler.attempts(model, retries=30):  # noqa: B007  # used after the loop
            for part in torch.ones(micro_batches, 8, 8):
                with accelerator.accumulate(model):
                    accelerator.backward(model(part).float().square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        return attempt

    assert step(2).info
    assert step(2).info
    assert layers[1].num_batches_tracked.item() == 4
    assert scaler.metrics()["skipped_steps"] > 5
    with pytest.raises(CallOrderError, match="with Accelerate, all bodies of accumulate"):
        step(1)


class _Lightning(LightningModule):
    """A module for Lightning with one loss for each of its layers, and an optimizer and a schedule for each."""

    def __init__(self, count=1, fused=False, **settings):
        super().__init__()
        self.parts = torch.nn.ModuleList(_Model(**settings) for _ in range(count))
        self.fused = fused

    @property
    def losses(self):
        return [lambda batch, part=part: _loss_fn(part(batch[0]), batch[1]) for part in self.parts]

    def training_step(self, batch, index):
        return self.losses[0](batch)

    def configure_optimizers(self):
        pairs = [_optimizer_of(part, self.fused) for part in self.parts]
        return [
            {"optimizer": each, "lr_scheduler": {"scheduler": schedule, "interval": "step"}} for each, schedule in pairs
        ]


def _options(folder, **options):
    """Return what tests leave out of a run of Lightning."""
    return {
        "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": folder, **options,
    }  # fmt: skip


def _fit(module, options, replaced=None):
    loader = torch.utils.data.DataLoader(_data(), batch_size=None)
    names = {"module": module, "loader": loader, "options": options}
    return _run("Lightning", names, replaced)["trainer"]


def _lightning_class(heading):
    *_, last = _run(heading, {"Module": _Lightning}).values()
    return last


def test_lightning_with_two_optimizers(tmp_path):
    """Manual optimization: each schedule follows the applied steps of its own optimizer."""
    module = _lightning_class("Lightning, manual optimization")(count=2)
    module.parts[1].bad = {3: INF}
    trainer = _fit(module, _options(tmp_path))
    assert [part.skipped() for part in module.parts] == [OVERFLOWS, {3}]
    counts = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert counts == [STEPS - len(OVERFLOWS), STEPS - 1]
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (16 - len(OVERFLOWS) - 1)


def test_full_float16():
    """float16 weights train by the setting."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).half()
    accelerator = Accelerator(cpu=True)
    _run("Full float16", {"accelerator": accelerator, "GradScaler": GradScaler})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=10.0))
    inputs, targets = _data(1)[0]
    for overflows in (False, True):
        before = model.weight.detach().clone()
        accelerator.backward(_loss_fn(model(inputs.half()), targets) * 1e-3)
        if overflows:
            model.weight.grad[0, 0] = INF
        optimizer.step()
        assert torch.equal(before, model.weight) == overflows == accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()


class _Critic(_Model):
    """A critic of single numbers."""

    def forward(self, inputs):
        return super().forward(inputs.float().expand(-1, 4))


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers(fused):
    """Each schedule follows its own optimizer; one loss scale backs off once for an overflow in either."""
    critic, generator = _Critic({1}), _Model({4})
    (critic_optimizer, critic_schedule), (optimizer, schedule) = (_optimizer_of(m, fused) for m in (critic, generator))
    names = {
        "critic": critic, "generator": generator, "critic_optimizer": critic_optimizer,
        "generator_optimizer": optimizer, "schedules": [critic_schedule, schedule],
        "critic_loss": lambda real, fake: (real - fake).float().mean(), "generator_loss": lambda fake: fake.mean(),
        "data": [(targets, inputs) for inputs, targets in _data()], "scaler": GradScaler("cpu", init_scale=2.0**10),
    }  # fmt: skip
    names = _run("Two optimizers", names)
    assert (critic.skipped(), generator.skipped()) == ({1}, {4})
    assert (critic_schedule.last_epoch, schedule.last_epoch) == (STEPS - 1, STEPS - 1)
    assert names["scaler"].get_scale() == 2.0**8


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_a_trainer_that_takes_any_scaler(kind, fused):
    """It knows which steps were applied."""
    model = _Model()
    optimizer, _ = _optimizer_of(model, fused)
    trainer = _run("A trainer that you maintain", {})["Trainer"](optimizer, kind("cpu", init_scale=2.0**10))
    skipped = set()
    for step, (inputs, targets) in enumerate(_data()):
        optimizer.zero_grad()
        trainer.scaler.scale(_loss_fn(model(inputs), targets)).backward()
        skipped |= set() if trainer.step() else {step}
    assert skipped == model.skipped() == OVERFLOWS


# --- rules of other programs, beside the lines of these programs


def _clipped_step(scaler, loss, optimizer, parameters, max_norm):
    """Take a step by the calls of MAE, Swin and ultralytics, in their order; return the norm."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _clipped_run(scaler, fused, bad, steps, after=lambda batch: None):
    """Return the norm and the scale of each step, and the weights; `after` is called with the number of each step."""
    model, run = _Model(bad), []
    optimizer, _ = _optimizer_of(model, fused)
    for batch, (inputs, targets) in enumerate(_data(steps)):
        optimizer.zero_grad()
        norm = _clipped_step(scaler, _loss_fn(model(inputs), targets), optimizer, model.parameters(), 0.1)
        after(batch)
        run.append((norm.item(), scaler.get_scale()))
    return run, model.layer.weight.tolist()


@pytest.mark.parametrize("fused", [False, True])
def test_icefall(fused, monkeypatch):
    """The policy has the scales and weights that icefall's lines give torch's scaler."""

    def rule(batch):
        scale = scaler.get_scale()
        if batch % 100 == 0 and (scale < 8.0 or (scale < 32.0 and batch % 400 == 0)):
            scaler.update(scale * 2.0)

    exec(code_of("docs/policies.md", "A rule around DynamicScaling: icefall"), names := {})
    policy = names["IcefallScaling"]()
    check_policy(policy)
    monkeypatch.setattr(type(policy), "rule", dataclasses.replace(policy.rule, init_scale=32.0, growth_interval=60))
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=60)
    run = functools.partial(_clipped_run, fused=fused, bad={3, 40, 100, 128, 348}, steps=450)
    assert run(GradScaler("cpu", policy=policy)) == run(scaler, after=rule)


@pytest.mark.parametrize("fused", [False, True])
def test_native_scaler(fused):
    """MAE's and Swin's class has the same norms, scales and weights."""
    loss_scaler = _run("MAE, Swin, BEiT, ConvNeXt", {"NativeScaler": SimpleNamespace})["loss_scaler"]
    run = functools.partial(_clipped_run, fused=fused, bad=OVERFLOWS, steps=STEPS)
    assert run(loss_scaler._scaler) == run(torch.amp.GradScaler("cpu"))


class _Trainer:
    """The parts of ultralytics' trainer that a step changes."""

    def __init__(self, fused):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.ema = copy.deepcopy(self.model)

    def _setup_train(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train(self):
        self._setup_train()
        for batch, (inputs, targets) in enumerate(_data()):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = self.model(inputs * (1e6 if batch in OVERFLOWS else 1.0))
            _clipped_step(self.scaler, _loss_fn(outputs, targets), self.optimizer, self.model.parameters(), 10.0)
            for name, average in self.ema.state_dict().items():
                if average.is_floating_point():
                    average.lerp_(self.model.state_dict()[name], 0.1)
        return self


@pytest.mark.parametrize("fused", [False, True])
def test_ultralytics(fused, monkeypatch):
    """An overflow of the forward pass stays out of BatchNorm's statistics and their average; weights are the same."""
    monkeypatch.setitem(sys.modules, "ultralytics.models.yolo.detect", SimpleNamespace(DetectionTrainer=_Trainer))
    yolo = SimpleNamespace(train=lambda trainer, fused: trainers.append(trainer(fused).train()))
    trainers = [_Trainer(fused).train()]
    _run("ultralytics", {"model": yolo, "options": {"fused": fused}})
    assert [trainer.scaler.get_scale() for trainer in trainers] == [2.0**7] * 2
    for pair in [trainer.model for trainer in trainers], [trainer.ema for trainer in trainers]:
        bad = [{name for name, value in each.state_dict().items() if not value.isfinite().all()} for each in pair]
        assert bad == [{"1.running_mean", "1.running_var"}, set()]
        assert all(map(torch.equal, *(each.parameters() for each in pair)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [1.0, INF, float("nan")])
def test_edm(factor, fused):
    """EDM takes a bad step, and `guarded` skips it; the other steps have the same bits."""
    skipped = {4} if factor != 1.0 else set()
    models = []
    for before, expected in ((True, set()), (False, skipped)):
        models.append(net := _Model({4: factor}))
        optimizer, average = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused), []
        names = {
            "net": net, "optimizer": optimizer, "ema": average, "update_ema": list.append, "torch": torch,
            "loss_fn": lambda net, pair: _loss_fn(net(pair[0]), pair[1]), "data": _data(),
        }  # fmt: skip
        exec(code_of(PAGE, "EDM, StyleGAN3: nan_to_num", before=before), names)
        assert (net.skipped(), len(average)) == (expected, STEPS - len(expected))
        assert bool(optimizer.state[net.layer.weight]["exp_avg_sq"].max() > 1e6) is (before and factor == INF)
    assert all(map(torch.equal, models[0].weights[:5], models[1].weights[:5]))
    assert torch.equal(models[0].layer.weight, models[1].layer.weight) is (not skipped)


# --- resuming


def _of_trainer(folder, fused):
    """Run transformers' Trainer to the end, and from its checkpoint of the eighth step."""
    for resumes in (False, True):
        model = _ModelWithLoss(BAD, first=8 if resumes else 0)
        replaced = {**RESUMABLE, "trainer.train()": f"trainer.train(resume_from_checkpoint={resumes})"}
        optim = "adamw_torch_fused" if fused else "adamw_torch"
        arguments = _arguments(folder, optim=optim, max_steps=16, save_strategy="steps", save_steps=8)
        names = _run("Hugging Face Trainer, TRL", {"model": model, "args": arguments, "dataset": _rows(16)}, replaced)
        shutil.rmtree(folder / "checkpoint-16")  # the run was stopped before
        yield model, names["trainer"].accelerator.scaler, names["trainer"].lr_scheduler


def _of_lightning(folder, fused):
    """Run Lightning to the end, and from a checkpoint of its first epoch."""
    checkpoint = str(folder / "last.ckpt")
    for epochs, first, fit in ((2, 0, {}), (1, 0, {}), (2, 8, {"ckpt_path": checkpoint})):
        module = _lightning_class("Lightning, automatic optimization")(fused=fused, bad=BAD, first=first)
        replaced = {**RESUMABLE, "fit(module, loader)": f"fit(module, loader, **{fit!r})"}
        trainer = _fit(module, _options(folder, max_epochs=epochs), replaced)
        if epochs == 1:
            trainer.save_checkpoint(checkpoint)
        else:
            schedule = trainer.lr_scheduler_configs[0].scheduler
            yield module.parts[0], trainer.precision_plugin.scaler, schedule


def _parts(first, fused):
    """Return a model, its optimizer and its schedule by the names that recipes have."""
    model = _Model(BAD, first=first)
    optimizer, scheduler = _optimizer_of(model, fused)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _of_accelerate(folder, fused):
    """Run Accelerate's loop to the end, without a warning of its schedule, and from what `save_state` wrote."""
    load = "accelerator.register_for_checkpointing(scheduler)\naccelerator.load_state(folder)\nfor inputs"
    for first, last, replaced in ((0, 16, {}), (0, 8, {}), (8, 16, {"for inputs": load})):
        names = {**_parts(first, fused), "data": _data(16)[first:last], "loss_fn": _loss_fn, "folder": str(folder)}
        with warnings.catch_warnings():
            warnings.filterwarnings("error" if last == 16 and not first else "default", message=".*lr_scheduler.step.*")
            names = _run("Accelerate", names, {**RESUMABLE, **replaced})
        assert names["optimizer"].scaler is names["scaler"]
        if last == 8:
            names["accelerator"].register_for_checkpointing(names["scheduler"])
            names["accelerator"].save_state(str(folder))
        else:
            yield names["model"], names["scaler"], names["scheduler"]


def _plain_run(fused, first=0, last=16, folder=None):
    names = _parts(first, fused)
    scaler = GradScaler("cpu", policy=POLICY, guard=SpikeGuard(warmup=2))
    names |= {"scaler": scaler, "folder": folder}
    if folder is not None:
        names = _run("Resume", names, {"dcp.save": "dict"})
    for inputs, targets in _data(16)[first:last]:
        names["optimizer"].zero_grad()
        scaler.scale(_loss_fn(names["model"](inputs), targets)).backward()
        scaler.unscale_and_clip_(names["optimizer"], 1.0)
        scaler.step(names["optimizer"])
        if scaler.update().applied:
            names["scheduler"].step()
    return names


def _of_distributed_checkpoint(folder, fused):
    """Run a plain loop to the end, and from what `torch.distributed.checkpoint` wrote; torch's scaler reads it, too."""
    whole, saved = _plain_run(fused), _plain_run(fused, last=8)
    _run("Resume", {**saved, "folder": folder}, {"dcp.load": "dict"})
    torchs = torch.amp.GradScaler("cpu")
    dcp.load({"scaler": torchs}, checkpoint_id=folder)
    assert torchs.state_dict().items() <= saved["scaler"].state_dict().items()
    for names in (whole, _plain_run(fused, first=8, folder=folder)):
        yield names["model"], names["scaler"], names["scheduler"]


RUNS = (_of_trainer, _of_lightning, _of_accelerate, _of_distributed_checkpoint)
EITHER_KIND = [(each, fused) for each in RUNS for fused in (False, True) if fused or each is not _of_lightning]
"""The page has a hook for fused optimizers under Lightning, which has a setting for others."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("runs", "fused"), EITHER_KIND, ids=lambda each: getattr(each, "__name__", each))
def test_a_stopped_run_resumes_exactly(runs, fused, tmp_path):
    """Scale, counters, guard, weights and schedule continue bit for bit, as each recipe saves them.

    Bad steps are skipped, and the schedule follows applied ones.
    """
    outcomes = []
    for model, scaler, schedule in runs(tmp_path, fused):
        state = scaler.state_dict()
        assert (state["skipped_steps"], state["guard"]["spikes"], schedule.last_epoch) == (2, 2, 16 - len(BAD))
        skipped = {model.first + step for step in model.skipped()}
        assert skipped == {step for step in BAD if step >= model.first}
        outcomes.append((model.layer.weight.tolist(), model.layer.bias.tolist(), state))
    whole, resumed = outcomes
    assert resumed == whole
