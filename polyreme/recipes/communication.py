"""What a pretraining step communicates: compiled under its plan and read, not run, beside the formula.

Floor: 7.
"""

from __future__ import annotations

import jax
import numpy as np

from polyreme.distributed.comm_report import Report, examine, workload_of
from polyreme.errors import ConfigError
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.training import Trainer


def report(config: PretrainConfig, balance: float | None = None) -> Report:
    """The Report of one training step of a configuration.

    balance: FLOP that hide one byte on the wire; the backend's own if None. Raises ConfigError with plan.pp above 1: a
    step is then many programs, one for each stage and direction, and only a run says how often each is called.
    """
    plan = config.parallel_plan
    if plan.mesh.pp > 1:
        raise ConfigError(
            f"plan.pp={plan.mesh.pp}: a step over pipeline stages is many programs, which this report does not read "
            "yet; set plan.pp=1 to see what one stage's layers communicate"
        )
    plan.mesh.check_devices(min(plan.mesh.size, len(jax.devices())))
    trainer = Trainer(config, jax.devices()[: plan.mesh.size])
    batch, seq = config.train.global_batch, config.model.seq_len
    program = trainer.compiled(np.zeros((batch, seq), np.int64), np.zeros((batch, seq), np.int64))
    itemsize = 4 if config.train.amp_level == "O0" else 2
    # the step takes the global norm once itself, to see that it is finite, and once to clip
    norms = 1 if config.train.clip_norm is None else 2
    work = workload_of(trainer.model, batch, seq, itemsize=itemsize, norms=norms)
    return examine([(program.as_text(), 1)], plan, work, jax.default_backend(), balance)
