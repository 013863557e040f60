"""Scripts that the tests of the launcher start, written to files by `write`."""

import textwrap
from pathlib import Path

ENVIRONMENT = """
    import json, os, sys
    print("out of rank", os.environ["PADDLE_TRAINER_ID"])
    names = [name for name in os.environ if name.startswith(("PADDLE_", "POLYREME_", "FLAGS_"))]
    with open(f"told.{os.environ['PADDLE_TRAINER_ID']}", "w") as file:
        json.dump({"arguments": sys.argv[1:], **{name: os.environ[name] for name in names}}, file)
"""
"""Needs nothing of polyreme."""

STEPS = """
    import ctypes, os, sys, time
    from pathlib import Path
    from polyreme import faults
    from polyreme.distributed.job import watchdog

    rank, world = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    watchdog.start(rank, world)

    def meet(step):
        '''A collective, as far as the others can tell: waits for a file of every rank.'''
        with watchdog.collective("all_reduce", "float32[4]"):
            Path(f"met.{step}.{rank}.{watchdog.flags.attempt()}").touch()
            while not all(Path(f"met.{step}.{r}.{watchdog.flags.attempt()}").exists() for r in range(world)):
                time.sleep(0.01)

    Path(f"pid.{rank}").write_text(str(os.getpid()))
    for step in range(1, int(sys.argv[1]) + 1):
        watchdog.step(step, batch=[2 * step, 2 * step + 1])
        with watchdog.phase("data"):
            if f"rank{rank}:exit@{step}" in sys.argv:
                sys.exit(3)
            if f"rank{rank}:leave@{step}" in sys.argv:
                sys.exit(0)
            if f"rank{rank}:lock@{step}" in sys.argv:
                ctypes.PyDLL(None).sleep(600)  # keeps Python's lock
            faults.point("data", step)
            time.sleep(0.02)
        meet(step)
        if watchdog.stop_requested_anywhere(step):
            print("stopped after step", step)
            sys.exit(75)
    watchdog.idle()
    print("done")
"""
"""Ranks that take steps together and meet in each; arguments: the number of steps, then what goes wrong."""

TRAINING = """
    import os, sys, time
    from pathlib import Path
    import numpy as np
    import polyreme as paddle
    import polyreme.distributed as dist
    from polyreme import faults, flags
    from polyreme.distributed.job import watchdog

    dist.init_parallel_env()
    rank = dist.get_rank()
    total = np.load("state.npz") if Path("state.npz").exists() else {"step": 0, "weight": np.zeros(4, np.float32)}
    first, weight = int(total["step"]), paddle.to_tensor(total["weight"])
    for step in range(first + 1, int(sys.argv[1]) + 1):
        watchdog.step(step, batch=[step])
        if flags.attempt() == 0:  # a fault that a restart gets over
            if f"rank{rank}:" in flags.faults():
                time.sleep(0.3)  # the other rank waits in its collective by now
                Path("fault").touch()
            faults.point("train.step", step)
        gradient = paddle.to_tensor(np.full(4, (rank + 1) / step, np.float32))
        dist.all_reduce(gradient)
        weight = weight - 0.1 * gradient
        if rank == 0:
            np.savez("state.new.npz", step=step, weight=weight.numpy())
            os.replace("state.new.npz", "state.npz")
        dist.barrier()
    watchdog.idle()
    if rank == 0:
        print("weight", weight.numpy().tolist())
"""
"""A loop with jax's collectives that saves its state after each step and goes on from it."""


JOINING = """
    import numpy as np
    import polyreme as paddle
    import polyreme.distributed as dist
    from polyreme.errors import PlacementError, RankError

    rank, rows = dist.get_rank(), np.arange(6.0).reshape(2, 3)
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    assert dist.is_initialized() and dist.get_world_size() == 2
    x = dist.shard_tensor(paddle.to_tensor(rows), mesh, [dist.Shard(0)])
    assert (x * 2).numpy().tolist() == (rows * 2).tolist()
    assert (x.sum().item(), x[1].tolist(), float(x.max())) == (15.0, [3.0, 4.0, 5.0], 5.0)
    assert "in pieces over several processes" in repr(x)
    there = dist.shard_tensor(paddle.to_tensor(rows), dist.ProcessMesh([1]), [dist.Replicate()])
    try:
        assert there.numpy().tolist() == rows.tolist() and rank == 1
    except PlacementError as error:
        assert rank == 0 and "lies on devices of processes [1] alone, and this is process 0" in str(error)
    try:
        x.numpy() if rank == 0 else dist.barrier()
    except RankError as error:
        print(error)
    print("so far", flush=True)
    if rank == 0:
        x.numpy()
"""
"""Ranks that never call init_parallel_env; at the end rank 0 gathers a Tensor and rank 1 does not."""


def write(folder: Path, script: str) -> Path:
    """The script as a file in folder."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return path
