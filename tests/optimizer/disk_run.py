"""A run whose optimizer state lies on disk, in several small buckets: in this process, or as a script of its own."""

import sys
from pathlib import Path

import jax
import numpy as np

from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import Adam, on_disk

SHAPES = [(8, 4), (4,), (3, 5), ()]
BUCKETS = 4
STEPS, INTERVAL = 6, 2


def train(folder: Path) -> None:
    """Train to the last step from the newest checkpoint in the folder, or from the start."""
    clear_plan()
    on_disk.BUCKET_BYTES = 100
    rng = np.random.default_rng(1)
    model = Layer()
    for at, shape in enumerate(SHAPES):
        setattr(model, f"p{at}", Parameter(rng.normal(size=shape).astype("float32")))
    plan = Plan.from_degrees(offload={"state": "disk"}, offload_path=str(folder / "ssd"))
    apply_plan(plan, model, jax.devices()[:1])
    optimizer = Adam(0.1, parameters=model.parameters())
    optimizer.create_state()
    assert len(optimizer.files.buckets) == BUCKETS
    names = {id(p): n for n, p in model.named_parameters()}

    def arrays():
        parameters = {n: p._array for n, p in model.named_parameters()}
        return parameters | optimizer.state_arrays(names, as_stored=True)

    with CheckpointStore(folder / "saved") as store:
        first = 0
        if store.steps():
            restored, meta = store.restore(arrays(), None)
            for name, p in model.named_parameters():
                p._array = restored[name]
            optimizer.load_state_arrays(restored, names)
            first = meta["step"]
        for step in range(first, STEPS):
            for p in model.parameters():
                noise = np.random.default_rng(step).normal(size=p.shape)
                p.grad = to_tensor((p.numpy() + noise).astype("float32"))
            optimizer.step()
            if (step + 1) % INTERVAL == 0:
                store.save(step + 1, arrays(), {})
            else:
                store.wait()  # the save went on beside this step
    clear_plan()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
