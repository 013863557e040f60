"""Predicted against compiled memory per device: `python benchmarks/planner_memory.py [WHICH] [--out FILE]`.

Each configuration's training step is compiled for virtual CPU devices and not run (recipes.planning.verify), and its
bytes on the fullest device are put beside planner.memory's. The rules and constants of planner/memory_cpu.py were read
off and set on the `tuned` list; the `held-out` list was compiled once they were. A plan that the prediction calls
fitting and the compiler refutes: one that is predicted within 92 % (DeviceKind.usable) of a device's memory and whose
compiled bytes exceed all of it; every configuration is held against the smallest device that it is predicted to fit.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from pydantic import ValidationError

from polyreme.distributed.auto_parallel.dims.graph import graph_of
from polyreme.distributed.auto_parallel.dims.infer import infer_dims
from polyreme.errors import ConfigError, PlacementError
from polyreme.hapi.input_spec import InputSpec
from polyreme.mesh import Plan
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.encoder_decoders.t5 import T5Config, T5ForConditionalGeneration
from polyreme.models.encoders.bert import BertConfig, BertForMaskedLM
from polyreme.nn import functional as F
from polyreme.nn.lazy import LazyGuard
from polyreme.optimizer import AdamW
from polyreme.planner import ModelGraph, Training
from polyreme.planner.memory import memory
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.estimate import shape_of
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.planning.job import TrainingJob, job_of
from polyreme.recipes.planning.plan import fused_training, graph_of_run
from polyreme.recipes.planning.verify import verify
from polyreme.recipes.samples import Input
from polyreme.training import MixedPrecision, StepPolicy
from polyreme.vision.models.resnet import BasicBlock, BottleneckBlock, ResNet
from polyreme.vision.models.vit import VisionTransformer

USABLE = 0.92


@dataclass(frozen=True)
class Case:
    """One configuration: a step of a model under a plan, and the same as the planner sees it."""

    name: str
    family: str
    job: TrainingJob
    graph: ModelGraph
    plan: Plan
    batch: int
    training: Training


def configured(batch: int, model: dict[str, Any], amp: str, plan: dict[str, Any]) -> Case:
    """A model that a configuration file describes; plan: the file's section, and train.accumulation as microbatches."""
    section = dict(plan)
    train = {"global_batch": batch, "amp_level": amp, "accumulation": section.pop("num_microbatches", 1)}
    config = PretrainConfig.model_validate({"model": model, "train": train, "plan": section, "device": "cpu"})
    dims = config.dimensions
    name = f"{dims.family} {dims.hidden_size} x {dims.num_layers}, {amp}{_choices(plan)}"
    graph = shape_of(dims).graph()
    return Case(name, dims.family, job_of(config), graph, config.parallel_plan, batch, fused_training(config))


def _choices(plan: dict[str, Any]) -> str:
    """What of a plan its mesh does not tell."""
    words = {
        "sharding_stage": "zero",
        "sequence_parallel": "sp",
        "num_microbatches": "m",
        "virtual_stages": "v",
        "recompute_share": "share ",
    }
    told = [f"{words.get(key, key)}{value}" for key, value in plan.items() if key in words]
    told += [str(plan[key]) for key in ("recompute", "schedule") if key in plan]
    return "".join(f", {word.replace('spTrue', 'sp')}" for word in told)


_DIMS = ("hidden_size", "num_layers", "num_heads", "seq_len", "vocab_size")


def gpt(batch: int, sizes: tuple[int, int, int, int, int], amp: str = "O0", **plan: Any) -> Case:
    """sizes: hidden, layers, heads, seq, vocabulary."""
    return configured(batch, dict(zip(_DIMS, sizes, strict=True)), amp, plan)


def llama(
    batch: int,
    sizes: tuple[int, int, int, int, int, int],
    amp: str = "O0",
    tied: bool = False,
    family: str = "llama",
    model: dict[str, Any] | None = None,
    **plan: Any,
) -> Case:
    """sizes: hidden, layers, heads, key-value heads, seq, vocabulary. model: other keys of its section."""
    keys = (*_DIMS[:3], "num_kv_heads", *_DIMS[3:])
    dims = {"family": family, "tie_embeddings": tied, **dict(zip(keys, sizes, strict=True)), **(model or {})}
    return configured(batch, dims, amp, plan)


def experts(
    batch: int,
    sizes: tuple[int, int, int, int, int, int],
    count: int,
    amp: str = "O0",
    family: str = "mixtral",
    **plan: Any,
) -> Case:
    """A decoder whose feed-forwards are experts, two of which work on a token."""
    return llama(batch, sizes, amp, family=family, model={"num_experts": count}, **plan)


def job(model: Any, loss: Any, inputs: tuple[Input, ...], amp: str) -> TrainingJob:
    """A step of AdamW."""

    def optimizer(made: Any) -> AdamW:
        return AdamW(1e-3, parameters=made.parameters(), weight_decay=0.1)

    policy = StepPolicy(MixedPrecision(amp, "bfloat16", master_grad=True), non_finite="halt")
    return TrainingJob(model, loss, inputs, optimizer, policy)


def traced(name: str, model: Any, inputs: tuple[Input, ...], plan: dict[str, Any], amp: str, loss: Any = None) -> Case:
    """A model that the planner sees by its own ops, as `Engine(strategy="auto")` does; loss: of (output, labels)."""
    loss = loss or F.cross_entropy
    training_job = job(model, lambda net, arrays: loss(net(arrays[0]), arrays[1]), inputs, amp)
    first, labels = (InputSpec(list(each.shape), np.dtype(each.dtype).name) for each in inputs)
    with LazyGuard():
        graph = graph_of(infer_dims(model(), [first], [labels], loss))
    training = Training(dtype="float32" if amp == "O0" else "bfloat16", master=amp == "O2", sums="program")
    named = f"{name}, {amp}{_choices(plan)}"
    return Case(named, name.split()[0], training_job, graph, Plan.from_degrees(**plan), inputs[0].shape[0], training)


def images(name: str, model: Any, size: int, batch: int, plan: dict[str, Any], amp: str = "O0") -> Case:
    """A classifier of images."""
    inputs = (Input((batch, 3, size, size), np.float32), Input((batch,), np.int64))
    return traced(f"{name}, {size} px", model, inputs, plan, amp)


def texts(name: str, model: Any, batch: int, seq: int, plan: dict[str, Any], amp: str = "O0") -> Case:
    """A model of token ids that gives logits of as many."""
    ids = Input((batch, seq), np.int64)
    return traced(name, model, (ids, ids), plan, amp)


def bert(batch: int, sizes: tuple[int, int, int, int, int], amp: str = "O0", **plan: Any) -> Case:
    """Masked words. sizes: hidden, layers, heads, seq, vocabulary."""
    config = BertConfig(**dict(zip(_DIMS, sizes, strict=True)), ffn_size=4 * sizes[0], dropout=0.0)
    return texts(f"bert {sizes[0]} x {sizes[1]}", lambda: BertForMaskedLM(config), batch, sizes[3], plan, amp)


class _Written(T5ForConditionalGeneration):
    """A T5 that writes what it reads."""

    def forward(self, ids: Any) -> Any:  # type: ignore[override]
        return super().forward(ids, decoder_input_ids=ids)


def t5(batch: int, sizes: tuple[int, int, int, int, int], amp: str = "O0", **plan: Any) -> Case:
    """sizes: hidden, layers of either side, heads, seq, vocabulary."""
    hidden, layers, heads, seq, vocab = sizes
    config = T5Config(vocab, hidden, layers, layers, heads, hidden // heads, 4 * hidden, dropout=0.0)
    return texts(f"t5 {hidden} x {layers}", lambda: _Written(config), batch, seq, plan, amp)


def vit(batch: int, sizes: tuple[int, int, int, int], amp: str = "O0", **plan: Any) -> Case:
    """A vision transformer with patches of 8. sizes: side of an image, width, depth, heads."""
    side, width, depth, heads = sizes

    def model() -> VisionTransformer:
        return VisionTransformer(side, 8, width, depth, heads, num_classes=100)

    return images(f"vit {width} x {depth}", model, side, batch, plan, amp)


def resnet(batch: int, depth: int, side: int, **plan: Any) -> Case:
    """A residual network."""
    block = BottleneckBlock if depth == 50 else BasicBlock
    return images(f"resnet{depth}", lambda: ResNet(block, depth, num_classes=100), side, batch, plan)


GPT = (256, 4, 8, 256, 4096)
LLAMA = (256, 4, 8, 4, 256, 4096)


def tuned() -> list[Case]:
    """What was looked at while the rules were made (and variants of it that differ in one setting)."""
    return [
        gpt(8, GPT),
        gpt(8, GPT, "O2"),
        gpt(8, GPT, recompute="full"),
        gpt(8, GPT, mp=2, sequence_parallel=True),
        gpt(16, GPT, sharding=2, sharding_stage=3),
        gpt(8, GPT, sep=2),
        gpt(16, GPT, pp=2, num_microbatches=4),
        gpt(16, GPT, pp=2, num_microbatches=4, schedule="ZBH1"),
        llama(8, LLAMA),
        llama(8, LLAMA, "O2", mp=2),
        llama(16, (256, 6, 8, 4, 256, 4096), pp=2, num_microbatches=4, schedule="VPP"),
        experts(8, (96, 2, 4, 2, 128, 1024), 4, ep=2),
        experts(8, (96, 4, 4, 2, 128, 1024), 4, pp=2, ep=2, num_microbatches=2),
        vit(32, (64, 256, 4, 8)),
        vit(32, (64, 256, 4, 8), sharding=2, sharding_stage=3),
        resnet(32, 18, 64),
        resnet(16, 50, 64),
        # a second round, of other sizes
        gpt(4, (128, 3, 4, 512, 2048), dp=2),
        gpt(8, (384, 3, 12, 128, 8192), "O1", mp=4),
        gpt(16, (192, 6, 6, 256, 1024), sharding=4, sharding_stage=2, recompute="full_attn"),
        llama(8, (256, 3, 8, 2, 512, 2048), sep=2, mp=2),
        llama(8, (128, 4, 4, 2, 384, 1024), "O2", tied=True, recompute="core_attn"),
        experts(8, (96, 2, 4, 2, 128, 1024), 8, ep=4),
        vit(32, (96, 192, 6, 6), "O2", dp=4),
        resnet(32, 34, 32, dp=2),
        llama(16, (128, 8, 4, 2, 256, 1024), "O2", pp=4, num_microbatches=8, recompute="full"),
        # was held out, at +14.0 %: weights that are gathered again are converted to float32 again
        gpt(16, (256, 6, 8, 256, 2048), "O2", mp=2, sharding=4, sharding_stage=3),
        # was held out, at +23.2 %: weights of 1 x 1 convolutions are not turned round
        resnet(48, 50, 64, dp=2, sharding=2, sharding_stage=1),
        # a third round, of small shapes: blocks of a pipeline computed again, 16 bits, backwards cut in two
        gpt(16, (96, 6, 4, 128, 1024), "O2", pp=2, num_microbatches=4, recompute="full", recompute_share=0.5),
        gpt(16, (96, 6, 4, 128, 1024), "O2", pp=2, num_microbatches=4, recompute="full"),
        gpt(16, (96, 4, 4, 128, 1024), pp=2, num_microbatches=4, schedule="ZBH1"),
        gpt(16, (96, 8, 4, 128, 1024), "O2", pp=2, num_microbatches=4, schedule="ZBH1"),
        gpt(8, (96, 2, 4, 128, 1024), "O2", num_microbatches=2, recompute="full"),
        gpt(8, (128, 2, 4, 128, 1024), "O1", sharding=4, sharding_stage=3),
        llama(8, (128, 2, 4, 2, 128, 1024), "O2", sharding=4, sharding_stage=3, recompute="full"),
    ]


def unseen() -> list[Case]:
    """Small configurations of every family, compiled once the rules of 2026-11-26 were made."""
    return [
        gpt(12, (80, 5, 5, 96, 768), "O2", num_microbatches=3, dp=2),
        gpt(12, (112, 4, 4, 160, 512), "O2", pp=2, num_microbatches=6, schedule="ZBH1", recompute="full"),
        gpt(16, (64, 9, 4, 128, 512), "O2", pp=2, num_microbatches=4, recompute="full", recompute_share=0.34),
        gpt(8, (96, 6, 4, 192, 640), pp=2, mp=2, num_microbatches=4, schedule="VPP", virtual_stages=3),
        gpt(8, (160, 3, 4, 96, 1280), "O1", mp=2, sharding=2, sharding_stage=3, recompute="full"),
        llama(8, (112, 5, 8, 2, 128, 896), "O2", dp=2, sep=2, recompute="full_attn", recompute_share=0.4),
        llama(16, (80, 6, 5, 5, 96, 1024), "O1", pp=2, sharding=2, sharding_stage=2, num_microbatches=4),
        llama(4, (144, 3, 6, 2, 256, 512), mp=2, sep=2),
        llama(8, (96, 6, 4, 2, 128, 1024), "O2", pp=4, num_microbatches=8, schedule="ZBVPP", virtual_stages=2),
        experts(8, (80, 3, 5, 5, 96, 768), 6, "O2", dp=2, ep=2),
        experts(4, (112, 3, 4, 2, 160, 512), 8, ep=2, sep=2),
        experts(8, (64, 4, 4, 4, 128, 512), 4, pp=2, ep=2, num_microbatches=4, recompute="full"),
        experts(8, (96, 3, 4, 2, 96, 640), 4, "O2", family="qwen3_moe", sharding=2, sharding_stage=2, ep=2),
        bert(8, (96, 3, 4, 128, 1024), dp=2),
        bert(8, (80, 4, 5, 96, 768), "O2"),
        t5(8, (96, 2, 4, 96, 1024), dp=2),
        vit(16, (48, 96, 4, 4), dp=2),
        vit(24, (64, 128, 3, 4), "O2", sharding=2, sharding_stage=3),
        resnet(16, 18, 32, dp=2),
    ]


def drawn() -> list[Case]:
    """Twelve drawn before any was looked at: other shapes, schedules, recompute, sharding, experts and offloads."""
    return [
        gpt(16, (72, 5, 6, 112, 900), "O2", dp=4, sharding=2, sharding_stage=1),
        gpt(
            12, (104, 7, 4, 144, 600), "O1", pp=2, dp=2, num_microbatches=6, schedule="Eager1F1B", recompute="core_attn"
        ),
        gpt(8, (128, 3, 8, 320, 400), recompute="full_attn", mp=2, sequence_parallel=True, num_microbatches=2),
        gpt(18, (88, 6, 4, 80, 1200), "O2", pp=3, num_microbatches=9, schedule="FThenB"),
        llama(12, (120, 6, 6, 3, 144, 700), pp=3, num_microbatches=6, schedule="ZBH1"),
        llama(
            8,
            (64, 8, 4, 4, 224, 384),
            "O1",
            pp=2,
            mp=2,
            num_microbatches=4,
            schedule="VPP",
            recompute="full",
            recompute_share=0.5,
        ),
        llama(8, (136, 4, 4, 1, 128, 1100), "O2", tied=True, sharding=4, sharding_stage=3, offload=["state"]),
        experts(8, (88, 3, 4, 4, 112, 640), 4, "O1", recompute="full", dp=2, ep=2),
        experts(16, (72, 4, 6, 2, 128, 512), 8, "O2", pp=2, ep=2, num_microbatches=4, sharding=2, sharding_stage=1),
        experts(8, (80, 4, 4, 2, 144, 768), 4, family="qwen3_moe", dp=2, ep=2, recompute="core_attn"),
        bert(12, (112, 2, 4, 80, 640), "O1", dp=2, recompute="full"),
        vit(16, (40, 120, 5, 6), "O1", sharding=2, sharding_stage=1),
    ]


def drawn_again() -> list[Case]:
    """Twelve more, drawn before any was looked at: pipelines that compute whole blocks again above all."""
    return [
        gpt(12, (96, 6, 4, 112, 640), "O2", pp=3, num_microbatches=6, recompute="full"),
        gpt(16, (80, 8, 5, 96, 896), pp=2, dp=2, num_microbatches=4, schedule="VPP", recompute="full"),
        gpt(8, (64, 4, 4, 512, 384), "O1", sep=2, recompute="full"),
        gpt(16, (112, 5, 4, 80, 1000), "O2", pp=2, num_microbatches=8, schedule="Eager1F1B", recompute="full_attn"),
        llama(12, (96, 6, 6, 2, 128, 700), "O1", pp=2, num_microbatches=6, recompute="full", recompute_share=0.7),
        llama(8, (128, 4, 8, 8, 96, 1200), "O2", mp=2, dp=2, sequence_parallel=True, recompute="core_attn"),
        llama(16, (72, 8, 6, 3, 160, 512), pp=4, num_microbatches=8, schedule="ZBVPP", virtual_stages=2),
        llama(8, (104, 5, 4, 2, 208, 448), "O2", sharding=2, sharding_stage=2, offload=["state"], num_microbatches=2),
        experts(8, (96, 4, 4, 2, 128, 512), 6, "O2", pp=2, ep=2, num_microbatches=4, recompute="full"),
        experts(8, (64, 3, 4, 4, 192, 640), 4, sharding=2, sharding_stage=3, ep=2),
        bert(8, (88, 3, 4, 112, 900), "O2", dp=2, num_microbatches=2),
        t5(8, (80, 2, 5, 80, 800), "O1", sharding=2, sharding_stage=1),
    ]


def drawn_last() -> list[Case]:
    """Twelve drawn before any was compiled, after the rules of gathered inputs and of parts computed again."""
    return [
        gpt(12, (104, 6, 4, 96, 720), "O2", pp=2, num_microbatches=6, recompute="full_attn"),
        gpt(8, (96, 4, 6, 160, 560), "O1", mp=2, sequence_parallel=True, dp=2),
        gpt(16, (88, 8, 4, 96, 480), "O2", pp=4, num_microbatches=8, recompute="core_attn", schedule="FThenB"),
        gpt(8, (120, 4, 5, 192, 840), "O2", sharding=2, sharding_stage=2, recompute="full_attn"),
        llama(8, (112, 5, 4, 2, 128, 640), "O1", mp=2, sequence_parallel=True, sharding=2, sharding_stage=1),
        llama(16, (96, 6, 6, 2, 112, 800), "O2", pp=2, mp=2, num_microbatches=4, sequence_parallel=True),
        llama(12, (80, 9, 4, 4, 96, 600), pp=3, num_microbatches=6, recompute="full_attn", recompute_share=0.5),
        llama(8, (128, 3, 4, 2, 256, 500), "O2", sep=2, dp=2, recompute="core_attn"),
        experts(8, (96, 3, 4, 2, 112, 560), 8, "O2", sharding=2, sharding_stage=1, ep=2, recompute="full_attn"),
        experts(8, (72, 4, 4, 4, 128, 640), 4, family="qwen3_moe", pp=2, ep=2, num_microbatches=4),
        bert(8, (104, 4, 4, 96, 720), "O2", sharding=2, sharding_stage=2),
        vit(16, (56, 104, 4, 4), "O1", dp=2),
    ]


def drawn_alone() -> list[Case]:
    """Twelve for one device, drawn before any was compiled, once there were rules for its order of operations. For a
    process with one device: CPU_NUM=1."""
    return [
        gpt(6, (112, 4, 4, 96, 700), "O2"),
        gpt(8, (80, 6, 5, 128, 512), recompute="full", num_microbatches=2),
        gpt(4, (128, 3, 4, 256, 640), "O1", recompute="full_attn"),
        llama(8, (104, 5, 4, 2, 112, 900), "O2", num_microbatches=4),
        llama(6, (128, 4, 8, 4, 160, 1200)),
        llama(8, (96, 6, 4, 4, 96, 800), "O1", recompute="full", recompute_share=0.5),
        llama(8, (88, 4, 4, 1, 144, 600), tied=True, recompute="core_attn", num_microbatches=2),
        experts(4, (96, 3, 4, 2, 128, 640), 4),
        experts(8, (72, 3, 4, 4, 96, 512), 6, "O2", recompute="full"),
        bert(8, (96, 3, 4, 112, 800)),
        t5(6, (80, 2, 4, 96, 900), "O2"),
        vit(16, (48, 112, 4, 4), "O2"),
    ]


def held_out() -> list[Case]:
    """Thirty configurations that no rule or constant was set on."""
    return [
        gpt(6, (320, 5, 10, 256, 3072)),
        gpt(32, (128, 8, 4, 256, 2048), dp=4),
        gpt(8, (512, 2, 8, 256, 8192), mp=2),
        gpt(8, (384, 4, 8, 512, 4096), "O2", mp=4, sequence_parallel=True),
        gpt(16, (256, 6, 4, 128, 8192), dp=2, sharding=2, sharding_stage=1),
        gpt(16, (192, 4, 6, 256, 3072), "O2", sharding=4, sharding_stage=3),
        gpt(24, (192, 6, 6, 256, 2048), dp=2, recompute="full"),
        gpt(8, (256, 3, 8, 1024, 2048), sep=4),
        gpt(16, (256, 4, 8, 256, 2048), "O1", num_microbatches=4, dp=2),
        gpt(24, (192, 6, 6, 256, 4096), pp=2, num_microbatches=6),
        gpt(16, (256, 8, 8, 256, 2048), pp=4, mp=2, num_microbatches=8),
        gpt(16, (192, 5, 4, 256, 1024), pp=2, num_microbatches=4, recompute="full"),
        llama(8, (384, 4, 12, 4, 256, 4096)),
        llama(16, (256, 6, 8, 2, 256, 8192), dp=2, mp=2),
        llama(8, (320, 3, 10, 5, 384, 2048), "O2"),
        llama(16, (256, 5, 8, 4, 256, 4096), "O2", sharding=4, sharding_stage=2),
        llama(8, (256, 4, 8, 4, 512, 2048), sharding=4, sharding_stage=3),
        llama(8, (256, 4, 8, 4, 256, 4096), mp=2, recompute="full_attn"),
        llama(16, (256, 6, 8, 4, 256, 2048), "O1", dp=2, recompute="full"),
        llama(16, (192, 6, 6, 3, 256, 2048), pp=2, num_microbatches=4, schedule="VPP", virtual_stages=2),
        llama(16, (256, 4, 8, 2, 256, 1024), pp=2, dp=2, num_microbatches=4, schedule="ZBH1"),
        experts(8, (192, 4, 6, 3, 256, 2048), 4),
        experts(8, (256, 3, 8, 8, 128, 2048), 8, ep=4),
        experts(16, (128, 5, 4, 2, 256, 1024), 8, "O2", dp=2, ep=2),
        experts(8, (256, 2, 4, 2, 256, 4096), 6, sharding=2, sharding_stage=1, ep=2),
        vit(24, (80, 192, 6, 6)),
        vit(64, (64, 320, 3, 10), dp=2, sharding=2, sharding_stage=2),
        vit(32, (96, 256, 5, 8), "O2", dp=4),
        resnet(24, 18, 96),
        resnet(24, 34, 64, sharding=2, sharding_stage=2),
    ]


_AMP = ("O0", "O1", "O2")
_SCHEDULES = ("1F1B", "Eager1F1B", "VPP", "ZBH1")


def at_random(seed: int, count: int) -> list[Case]:
    """So many configurations drawn at random, in processes of the number of devices there are: families, sizes, dtypes,
    recompute, schedules, sharding, microbatches; of one device fine-tuning too. A seed draws the same ones again."""
    draw, result = random.Random(f"{seed} of {len(jax.devices())} devices"), []
    while len(result) < count:
        try:
            result.append(_drawn(draw))
        except (ConfigError, PlacementError, ValidationError):  # dims that do not divide: another is drawn
            continue
    return result


def _drawn(draw: random.Random) -> Case:
    family = draw.choice(("gpt", "llama", "qwen2", "mixtral", "qwen3_moe", "bert", "t5", "vit"))
    if len(jax.devices()) == 1 and draw.random() < _TUNED:
        return _tuned_at_random(draw)
    width = draw.choice((4, 6)) * draw.choice((16, 20, 24, 28, 32))
    heads, layers, seq = 4 if width % 4 == 0 and width % 6 else 6, draw.randint(2, 7), 16 * draw.randint(5, 20)
    amp, vocab = draw.choice(_AMP), 20 * draw.randint(20, 70)
    plan = _plan_at_random(draw, family)
    ways = plan.get("dp", 1) * plan.get("sharding", 1) * plan.get("ep", 1)
    batch = max(4, ways * plan.get("num_microbatches", 1) * draw.choice((1, 2)))
    if family in ("bert", "t5", "vit"):
        plan.pop("num_microbatches", None)
        sizes = (width, layers, heads, seq, vocab)
        if family == "vit":
            return vit(max(batch, 8), (8 * draw.randint(4, 8), width, layers, heads), amp, **plan)
        return (bert if family == "bert" else t5)(batch, sizes, amp, **plan)
    if family == "gpt":
        return gpt(batch, (width, layers, heads, seq, vocab), amp, **plan)
    sizes = (width, layers, heads, draw.choice((heads, heads // 2)), seq, vocab)
    if family in ("mixtral", "qwen3_moe"):
        return experts(batch, sizes, draw.choice((4, 8)), amp, family=family, **plan)
    return llama(batch, sizes, amp, tied=draw.random() < _TIED, family=family, **plan)


_TUNED, _TIED = 0.4, 0.3


def _plan_at_random(draw: random.Random, family: str) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if draw.random() < 1 / 2:
        plan["recompute"] = draw.choice(("core_attn", "full_attn", "full"))
    if len(jax.devices()) == 1:
        return plan | ({"num_microbatches": draw.choice((2, 4))} if draw.random() < 1 / 3 else {})
    is_text = family in ("gpt", "llama", "qwen2", "mixtral", "qwen3_moe")
    axes = draw.sample(("dp", "sharding", "mp", *(("pp", "sep") if is_text else ())), draw.choice((1, 2)))
    if "mixtral" in family or "moe" in family:
        axes = [*axes[:1], "ep"]
    plan |= dict.fromkeys(axes, 2)
    if "sharding" in axes:
        plan["sharding_stage"] = draw.choice((1, 2, 3) if "pp" not in axes else (1, 2))
    if "mp" in axes and is_text and draw.random() < 1 / 2:
        plan["sequence_parallel"] = True
    if "pp" in axes:
        plan |= {"num_microbatches": draw.choice((4, 6, 8)), "schedule": draw.choice(_SCHEDULES)}
    elif draw.random() < 1 / 4:
        plan["num_microbatches"] = 2
    return plan


def _tuned_at_random(draw: random.Random) -> Case:
    """Fine-tuning of a LLaMA on one device."""
    width, layers = draw.choice((64, 96, 128)), draw.randint(3, 5)
    settings: dict[str, Any] = {
        "stage": draw.choice(("sft", "dpo", "rm", "kto")),
        "fine_tuning": draw.choice(("full", "lora", "lora", "freeze")),
        "max_seq_len": 16 * draw.randint(5, 14),
        "train": {"global_batch": draw.choice((4, 8)), "amp_level": draw.choice(_AMP)},
    }
    if settings["fine_tuning"] == "lora":
        settings["lora_target"] = draw.choice((["all"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]))
    if settings["fine_tuning"] == "freeze":
        settings["freeze_trainable_layers"] = 2
    if draw.random() < 1 / 3:
        settings["train"]["accumulation"] = 2
    if draw.random() < 1 / 4:
        settings["plan"] = {"recompute": "full"}
    return fine_tuned(width, layers, 20 * draw.randint(30, 80), settings)


def fine_tuned(width: int, layers: int, vocab: int, settings: dict[str, Any]) -> Case:
    """Fine-tuning of a LLaMA of 4 heads, rows not packed."""
    folder = tempfile.mkdtemp(dir=_BASES.name)  # weights are read when the case is compiled
    sizes = LlamaConfig(vocab, width, layers, 4, num_kv_heads=4, ffn_size=3 * width, seq_len=512, tie_embeddings=False)
    Llama(sizes).save_pretrained(folder)
    data = {"data": {"train": "rows.jsonl"}, "packing": False, "device": "cpu"}
    config = FinetuneConfig.model_validate({"model": folder, **data, **settings})
    graph, rows = graph_of_run(config)
    told = [settings["stage"], settings["fine_tuning"], *settings.get("lora_target", [])]
    told += [f"m{config.train.accumulation}"] * (config.train.accumulation > 1) + [config.parallel_plan.recompute]
    name = f"llama {width} x {layers}, {config.train.amp_level}, {' '.join(told)}"
    return Case(name, "fine-tuning", job_of(config), graph, config.parallel_plan, rows, fused_training(config))


_BASES = tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Row:
    """A case's figures, bytes on the fullest device."""

    case: Case
    predicted: float
    compiled: float
    seconds: float
    micros: float

    @property
    def error(self) -> float:
        """Predicted over compiled, less 1."""
        return self.predicted / self.compiled - 1

    @property
    def refuted(self) -> bool:
        """Whether it would not fit the smallest device on which it is predicted to."""
        return self.compiled > self.predicted / USABLE


_REPEATS = 10


def measured(case: Case) -> Row:
    """A case, compiled."""
    told = (case.graph, case.plan, case.batch, case.training, "cpu")
    stages = memory(*told)
    start = time.process_time()
    for _ in range(_REPEATS):
        memory(*told)
    micros = (time.process_time() - start) / _REPEATS * 1e6
    start = time.perf_counter()
    found = verify(case.job, case.plan)
    jax.clear_caches()
    seconds = time.perf_counter() - start
    return Row(case, max(stage.total for stage in stages), found.total, seconds, micros)


def table(rows: list[Row]) -> str:
    """The rows and what they come to, as Markdown."""
    lines = [
        "| configuration | family | mesh | predicted MiB | compiled MiB | error | compile s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = f"{row.predicted / 2**20:.1f} | {row.compiled / 2**20:.1f} | {100 * row.error:+.1f} %"
        lines.append(f"| {row.case.name} | {row.case.family} | {row.case.plan.mesh} | {sizes} | {row.seconds:.0f} |")
    errors = [abs(row.error) for row in rows]
    refuted = [row.case.name for row in rows if row.refuted]
    lines += [
        "",
        f"{len(rows)} configurations: median error {100 * statistics.median(errors):.1f} %, worst "
        f"{100 * max(errors):.1f} %; called fitting and refuted by the compiler: {', '.join(refuted) or 'none'}. "
        f"A prediction takes {statistics.median(row.micros for row in rows):.0f} us (median).",
    ]
    for family in dict.fromkeys(row.case.family for row in rows):
        own = [abs(row.error) for row in rows if row.case.family == family]
        lines.append(
            f"- {family}: {len(own)}, median {100 * statistics.median(own):.1f} %, worst {100 * max(own):.1f} %"
        )
    return "\n".join(lines)


def main() -> None:
    """Compile a list, or both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    lists = {
        "drawn-alone": drawn_alone,
        "drawn-last": drawn_last,
        "drawn-again": drawn_again,
        "drawn": drawn,
        "unseen": unseen,
        "held-out": held_out,
        "tuned": tuned,
    }
    parser.add_argument("which", nargs="?", choices=(*lists, "all"), default="all")
    parser.add_argument("--seed", type=int, help="so many configurations drawn at random with this seed, not a list")
    parser.add_argument("--count", type=int, default=15, help="how many are drawn at random")
    parser.add_argument("--predict", action="store_true", help="predict alone: nothing is compiled")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    if args.seed is not None:
        lists = {f"seed {args.seed}, {len(jax.devices())} devices": lambda: at_random(args.seed, args.count)}
        args.which = "all"
    text = []
    for which, cases in lists.items():
        if args.which not in (which, "all"):
            continue
        rows = []
        for case in cases():
            if args.only in case.name and args.predict:
                most = max(s.total for s in memory(case.graph, case.plan, case.batch, case.training, "cpu"))
                print(f"| {case.name} | {case.plan.mesh} | {most / 2**20:.1f} |", flush=True)
            elif args.only in case.name:
                try:
                    rows.append(measured(case))
                except ConfigError as error:  # drawn, but what the model cannot do
                    print(f"{which}: {case.name}: refused: {error}", flush=True)
                    continue
                print(f"{which}: {case.name}: {100 * rows[-1].error:+.1f} % ({rows[-1].seconds:.0f} s)", flush=True)
        if args.predict:
            continue
        text.append(f"## {which}\n\n{table(rows)}")
    print("\n\n".join(text))
    if args.out:
        args.out.write_text(f"{_HEADER}\n\n" + "\n\n".join(text) + "\n")


_HEADER = f"""# Predicted against compiled memory per device

`python benchmarks/planner_memory.py --out FILE`; jax {jax.__version__}, virtual CPU devices, nothing allocated or run.
Bytes of the fullest device: arguments, outputs and temporaries less what is aliased; over pipeline stages those of all
programs, with as many microbatches as the schedule keeps. The rules were made on the `tuned` list. Two configurations
that were held out came out beyond 12 % (a GPT under sharding stage 3 and O2 at +14.0 %, a ResNet-50 under stage 1 at
+23.2 %) and showed what a rule left out; they are in the `tuned` list since, and two that had not been compiled before
took their places. Compile seconds are of a machine that others were using."""


if __name__ == "__main__":
    main()
