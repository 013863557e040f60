"""A run whose experts lie on disk and are brought one by one: in this process, or as a script of its own."""

import sys
from pathlib import Path

import jax
import numpy as np

import polyreme.optimizer as opt
from polyreme.core import rng, state
from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.mesh import Plan
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.nn.lazy import LazyGuard
from polyreme.training import StepPolicy

STEPS, INTERVAL = 4, 2


def train(folder: Path, ep: int = 1) -> None:
    """Train over so many devices to the last step from the newest checkpoint in the folder, or from the start."""
    clear_plan()
    rng.seed(3)
    plan = Plan.from_degrees(ep=ep, offload={"expert": "disk"}, offload_path=str(folder / "ssd"))
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "expert_ffn_size": 8, "num_experts": 8}
    with LazyGuard():
        model = Mixtral(MixtralConfig.nano(vocab_size=64, seq_len=8, experts_per_token=1, routing="hash", **sizes))
    step = PlannedStep(
        model, plan, lambda m: opt.AdamW(0.1, parameters=m.parameters()), StepPolicy(), jax.devices()[:ep]
    )
    names = {id(p): n for n, p in model.named_parameters()}

    def arrays():
        parameters = {n: getattr(p._array, "saved", p._array) for n, p in model.named_parameters()}
        return parameters | step.optimizer.state_arrays(names, as_stored=True)

    with CheckpointStore(folder / "saved") as store:
        first = 0
        if store.steps():
            restored, meta = store.restore(arrays(), None)
            for name, p in model.named_parameters():
                state.write(p, restored[name])
            step.optimizer.load_state_arrays(restored, names)
            first = meta["step"]
        for number in range(first, STEPS):
            ids = np.random.default_rng(number).integers(0, 4 * (number + 1), (2, 9))
            step(ids[:, :-1], ids[:, 1:])
            if (number + 1) % INTERVAL == 0:
                store.save(number + 1, arrays(), {})
            else:
                store.wait()
    clear_plan()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
