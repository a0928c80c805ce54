"""The recipes of docs/trainers.md for trainers of other packages, with the real packages, and their resumed runs."""

import math
import shutil
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from transformers import TrainingArguments

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.torch_programs import Model, bits, data_of, loss_fn, optimizer_of, run_recipe, source_of

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("new_accelerator")]
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=2, hysteresis=2)
NAMES = {"POLICY": POLICY, "SpikeGuard": SpikeGuard}
RESUMABLE = {'policy="dynamic"': "policy=POLICY, guard=SpikeGuard(warmup=2)"}
BAD = {1: math.inf, 5: 1000.0, 9: math.nan, 13: 1000.0}
"""The factors of the gradients in four of 16 steps; a run is stopped after eight steps."""


# --- transformers and TRL


def _arguments(folder, guards, kind=TrainingArguments, **settings):
    return kind(
        output_dir=str(folder), per_device_train_batch_size=8, use_cpu=True, report_to=[], logging_steps=1,
        disable_tqdm=True, learning_rate=0.1, bf16=guards, max_grad_norm=1.0 - guards, **settings,
    )  # fmt: skip


def _run_trainer(guards, replaced, **names):
    heading = "Hugging Face Trainer, TRL" + (", in bfloat16" if guards else "")
    return run_recipe(heading, {**NAMES, **names}, replaced)["trainer"]


def _small_language_model():
    """Return a language model of three words, and its tokenizer, made without a download."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, "<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=3, pad_token_id=0, eos_token_id=1, **sizes)), tokenizer


@pytest.mark.parametrize("guards", [False, True])
def test_trl(guards, tmp_path, capsys):
    """Supervised fine-tuning skips a bad step; its schedule follows applied steps, and loggers get the count."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = _small_language_model()
    norm, weights = model.model.norm, []

    def spoil(grad):
        weights.append(norm.weight.tolist())
        return grad * (math.nan if len(weights) == 2 else 1.0)

    norm.weight.register_hook(spoil)
    names = {"model": model, "tokenizer": tokenizer, "SFTTrainer": SFTTrainer}
    names["args"] = _arguments(tmp_path, guards, SFTConfig, num_train_epochs=1, save_strategy="no")
    names["dataset"] = Dataset.from_list([{"text": "a"}] * 32)  # four batches
    replaced = {" Trainer(model, args,": " SFTTrainer(model, args, processing_class=tokenizer,"}
    trainer = _run_trainer(guards, replaced, **names)
    changed = [before != after for before, after in pairwise([*weights, norm.weight.tolist()])]
    assert changed == [True, False, True, True]
    assert trainer.lr_scheduler.last_epoch == 3
    if guards:
        assert [log["skipped_steps"] for log in trainer.state.log_history] == [0, 1, 1, 1, 1]
        assert capsys.readouterr().out.count("skipped_steps") == 5  # of the callback that prints
    else:
        assert trainer.accelerator.scaler.get_scale() == 2.0**15


# --- Accelerate


def test_full_float16():
    """The setting of the recipe trains float16 weights, and skips the steps that overflow."""
    model, accelerator = Model().half(), Accelerator(cpu=True)
    run_recipe("Full float16", {"accelerator": accelerator, "GradScaler": GradScaler})
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=10.0))
    for inputs, targets in data_of():
        accelerator.backward(loss_fn(model(inputs), targets) * 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert model.skipped() == {*model.bad}


# --- Lightning


class _Module(LightningModule):
    """A module with a loss, an optimizer and a schedule for each of its models."""

    def __init__(self, *models, fused=False):
        super().__init__()
        self.parts, self.fused = torch.nn.ModuleList(models), fused

    @property
    def losses(self):
        return [lambda batch, part=part: loss_fn(part(batch[0]), batch[1]) for part in self.parts]

    def training_step(self, batch, index):
        return self.losses[0](batch)

    def configure_optimizers(self):
        pairs = [optimizer_of(part, self.fused) for part in self.parts]
        keys = "optimizer", "lr_scheduler"
        return [dict(zip(keys, (o, {"scheduler": s, "interval": "step"}), strict=True)) for o, s in pairs]


def _fit(kind, models, folder, replaced=(), fused=False, epochs=1):
    options = {
        "max_epochs": epochs, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    *_, module = run_recipe(f"Lightning, {kind} optimization", {"Module": _Module}).values()
    loader = torch.utils.data.DataLoader(data_of(), batch_size=None)
    names = {**NAMES, "module": module(*models, fused=fused), "loader": loader, "options": options}
    return run_recipe("Lightning", names, replaced)["trainer"]


def test_lightning_with_two_optimizers(tmp_path):
    """In manual optimization each schedule follows the applied steps of its own optimizer."""
    models = [Model(), Model({3})]
    trainer = _fit("manual", models, tmp_path)
    for model, config in zip(models, trainer.lr_scheduler_configs, strict=True):
        assert (model.skipped(), config.scheduler.last_epoch) == ({*model.bad}, 8 - len(model.bad))
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (16 - 4)


# --- resumed runs: each function yields the outcome of a whole run, and of a run from the checkpoint of step 8


def _rows(steps):
    """Return single rows of data by name, as transformers' collator takes them."""
    return [{"inputs": x, "labels": y} for batch in data_of(steps) for x, y in zip(*batch, strict=True)]


def _of_trainer(folder, fused, guards=False):
    optim = "adamw_torch_fused" if fused else "adamw_torch"
    for resumes in (False, True):
        replaced = {"SpikeGuard()": "SpikeGuard(warmup=2)"} if guards else RESUMABLE
        replaced = {**replaced, "train()": f"train(resume_from_checkpoint={resumes})"}
        model = Model(BAD, first=8 * resumes)
        args = _arguments(folder, guards, max_steps=16, optim=optim, save_strategy="steps", save_steps=8)
        trainer = _run_trainer(guards, replaced, model=model, args=args, dataset=_rows(16))
        shutil.rmtree(folder / "checkpoint-16")  # the run was stopped before
        if guards:
            counts = [(log["skipped_steps"], log["spikes"]) for log in trainer.state.log_history]
            expected = {0: (0, 0), 1: (1, 0), 5: (1, 1), 9: (2, 1), 13: (2, 2), -1: (2, 2)}
            assert {step: counts[step] for step in expected} == expected
        scaler = trainer.optimizer.optimizer if guards else trainer.accelerator.scaler
        yield model, scaler, trainer.lr_scheduler


def _of_guarded_trainer(folder, fused):
    return _of_trainer(folder, fused, guards=True)


def _of_lightning(folder, fused):
    checkpoint = str(folder / "last.ckpt")
    for epochs, first, fit in ((2, 0, {}), (1, 0, {}), (2, 8, {"ckpt_path": checkpoint})):
        replaced = {**RESUMABLE, "fit(module, loader)": f"fit(module, loader, **{fit!r})"}
        model = Model(BAD, first=first)
        trainer = _fit("automatic", [model], folder, replaced, fused, epochs)
        if epochs == 1:
            trainer.save_checkpoint(checkpoint)
        else:
            yield model, trainer.precision_plugin.scaler, trainer.lr_scheduler_configs[0].scheduler


def _of_loop(folder, fused, load, save, heading="PyTorch", page="README.md"):
    for first, last in ((0, 16), (0, 8), (8, 16)):
        model = Model(BAD, first=first)
        optimizer, scheduler = optimizer_of(model, fused)
        names = {**NAMES, "model": model, "optimizer": optimizer, "scheduler": scheduler, "loss_fn": loss_fn}
        names |= {"data": data_of(16)[first:last], "folder": str(folder)}
        replaced = {**RESUMABLE, "\nfor inputs": f"\n{load if first else ''}\nfor inputs"}
        names = run_recipe(heading, names, replaced, page=page)
        if last == 8:
            exec(save, names)
        else:
            yield model, names["scaler"], scheduler


def _of_accelerate(folder, fused):
    register = "accelerator.register_for_checkpointing(scheduler)\n"
    calls = (f"{register}accelerator.{name}_state(folder)" for name in ("load", "save"))
    return _of_loop(folder, fused, *calls, "Accelerate", "docs/trainers.md")


def _of_distributed_checkpoint(folder, fused):
    load, save = (source_of("Resume", {f"dcp.{other}": "dict"}) for other in ("save", "load"))
    return _of_loop(folder, fused, load, save)


RUNS = (_of_trainer, _of_guarded_trainer, _of_lightning, _of_accelerate, _of_distributed_checkpoint)
RUNS_OF_EITHER_KIND = [(run, fused) for run in RUNS for fused in (False, True) if fused or run is not _of_lightning]
"""The page has a hook for fused optimizers under Lightning, which has a setting for others."""


@pytest.mark.parametrize(("run", "fused"), RUNS_OF_EITHER_KIND)
def test_a_stopped_run_resumes_exactly(run, fused, tmp_path):
    """A stopped run that a recipe resumes ends with the bits of a whole run, in counters, guard and optimizer, too."""
    outcomes = []
    for model, scaler, schedule in run(tmp_path, fused):
        counts = scaler.metrics()
        assert (counts["skipped_steps"], counts["spikes"], schedule.last_epoch) == (2, 2, 16 - len(BAD))
        assert model.skipped() == {step for step in BAD if step >= model.first}
        outcomes.append(bits(model.layer.state_dict(), scaler.state_dict()))
    whole, resumed = outcomes
    assert resumed == whole
