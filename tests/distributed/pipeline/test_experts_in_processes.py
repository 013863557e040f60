"""Experts in files of two processes, each of which keeps those of its own devices: as one process trains them."""

from pathlib import Path

import numpy as np
import pytest

SIZE, DEVICES = 2, 2
MESH = {"ep": 2, "sharding": 2, "sharding_stage": 3}
LIMIT = 240


def train(folder, kinds, mesh):
    """-> losses and gradient norms of four steps, a matrix of experts with its moments, bytes of files."""
    import jax  # noqa: PLC0415  (each rank's environment is set by now)

    from polyreme.core import rng  # noqa: PLC0415
    from polyreme.distributed.placement import clear_plan  # noqa: PLC0415
    from polyreme.distributed.planned_step import PlannedStep  # noqa: PLC0415
    from polyreme.mesh import Plan  # noqa: PLC0415
    from polyreme.models.experts.mixtral import Mixtral, MixtralConfig  # noqa: PLC0415
    from polyreme.nn.clip import ClipGradByGlobalNorm  # noqa: PLC0415
    from polyreme.nn.lazy import LazyGuard  # noqa: PLC0415
    from polyreme.optimizer import AdamW  # noqa: PLC0415
    from polyreme.training import StepPolicy  # noqa: PLC0415

    def adamw(model):
        return AdamW(0.1, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0))

    rng.seed(3)
    plan = Plan.from_degrees(offload=dict.fromkeys(kinds, "disk"), offload_path=str(folder), num_microbatches=2, **mesh)
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "expert_ffn_size": 8, "num_experts": 8}
    with LazyGuard():
        model = Mixtral(MixtralConfig.nano(vocab_size=64, seq_len=8, experts_per_token=1, routing="hash", **sizes))
    step = PlannedStep(model, plan, adamw, StepPolicy(non_finite="skip"), jax.devices()[: plan.mesh.size])
    told = []
    for number in range(4):
        # of few ids, which go to few experts: others miss updates
        ids = np.random.default_rng(number).integers(0, 4 * (number + 1), (8, 9))
        result = step(ids[:, :-1], ids[:, 1:])
        told.append([float(result.loss), float(result.grad_norm)])
    up = model.blocks[0].ffn.up
    moments = {
        n: value.numpy() for n, value in step.optimizer.state_dict().items() if n.startswith(f"{up.name}_moment")
    }
    found = {"told": np.array(told), "up": up.numpy(), **{n.removeprefix(up.name): v for n, v in moments.items()}}
    nbytes = sum(part.nbytes for file in step.files for bucket in file.buckets for part in bucket.file.parts)
    clear_plan()
    return found, nbytes


def job(folder, kinds):
    """What each process does."""
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import ConfigError  # noqa: PLC0415

    dist.barrier()
    found, nbytes = train(Path(folder, "disk"), kinds, MESH)
    np.savez(Path(folder, f"{dist.get_rank()}.npz"), nbytes=nbytes, **found)
    if kinds == ("expert",):
        with pytest.raises(ConfigError, match=r"hold other parts of the experts of .* set sharding_stage to 3"):
            train(Path(folder, "disk"), kinds, {"sharding": 4, "sharding_stage": 1})


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("expert",), ("param", "state")], ids=["experts", "all"])
def test_two_processes_train_as_one(kinds, tmp_path):
    from polyreme.distributed.spawning import spawn  # noqa: PLC0415

    env = {"PADDLE_LOG_DIR": tmp_path, "POLYREME_INIT_TIMEOUT": 60, "POLYREME_WATCHDOG_TIMEOUT": 200}
    running = spawn(job, (str(tmp_path), kinds), nprocs=SIZE, join=False, cpu_num=DEVICES, env=env)
    try:
        running.join(LIMIT)
    finally:
        running.end()
    want, whole = train(tmp_path / "alone", kinds, MESH)
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(SIZE)]
    for name, value in want.items():
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name], err_msg=name)
        # means of 64 terms in another order, four steps after one another
        scale = np.abs(value).max()
        np.testing.assert_allclose(ranks[0][name] / scale, value / scale, atol=4 * 64 * 2.0**-23, err_msg=name)
    # each has a half of what one has
    assert [int(rank["nbytes"]) for rank in ranks] == [whole // 2] * SIZE
