"""A training step of a model family under a plan, as every benchmark here takes it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ.setdefault("CPU_NUM", str(DEVICES))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402  (the number of devices is fixed when it starts)
import numpy as np  # noqa: E402

from polyreme.core import layout as layouts  # noqa: E402
from polyreme.core import rng  # noqa: E402
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch  # noqa: E402
from polyreme.jit import to_static  # noqa: E402
from polyreme.mesh import Plan  # noqa: E402
from polyreme.models.decoders.gpt import GPT, GPTConfig  # noqa: E402
from polyreme.models.decoders.llama import Llama, LlamaConfig  # noqa: E402
from polyreme.nn.clip import ClipGradByGlobalNorm  # noqa: E402
from polyreme.optimizer import AdamW  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


class Step:
    """A model under a plan with one captured training step (AdamW, clipped) and the arguments of a call."""

    def __init__(self, family: str, plan: Plan, batch: int = 16, **sizes: Any) -> None:
        clear_plan()
        rng.seed(3)
        make = {"gpt": lambda: GPT(GPTConfig.nano(**sizes)), "llama": lambda: Llama(LlamaConfig.nano(**sizes))}
        self.plan, self.batch = plan, batch
        self.model = make[family]()
        self.layout = apply_plan(plan, self.model, jax.devices()[: plan.mesh.size])
        parameters = self.model.parameters()
        self.optimizer = AdamW(1e-3, parameters=parameters, grad_clip=ClipGradByGlobalNorm(1.0))
        config = self.model.config
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.seq_len + 1))
        self.arguments = [self._place(tokens[:, :-1]), self._place(tokens[:, 1:])]
        self.run = to_static(self._train)
        self.backward = to_static(self._backward)

    def __call__(self) -> float:
        """One step; its loss."""
        layouts.active.layout = self.layout  # several steps, each under its own plan, take turns
        return float(self.run(*self.arguments))

    def compiled(self) -> Any:
        """The step's compiled program."""
        return self.run.compiled(*self.arguments)

    def _place(self, rows: np.ndarray) -> Any:
        return shard_batch(self.layout, rows, "batch", None)

    def _backward(self, tokens: Any, labels: Any) -> Any:
        loss = self.model(tokens, labels)
        loss.backward()
        return loss

    def _train(self, tokens: Any, labels: Any) -> Any:
        loss = self._backward(tokens, labels)
        self.optimizer.step()
        self.optimizer.clear_grad()
        return loss


def save(name: str, title: str, what: str, text: str) -> Path:
    """Writes a result with what it was measured on to benchmarks/results/."""
    path = RESULTS / f"{name}.md"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    versions = ", ".join(f"{p} {version(p)}" for p in ("jax", "jaxlib", "numpy"))
    path.write_text(f"# {title}, {date.today()}\n\n{what}\n{machine}; {versions}.\n\n{text}\n")
    return path


def markdown(rows: list[tuple]) -> str:
    """Rows as a markdown table, the first one its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
