"""What a configuration will cost, from its dimensions alone: parameters, FLOP, bytes of memory.

Floor: 7.  Never imports: jax.  Exact for parameters; memory is an estimate and says so where it is shown.
"""

from dataclasses import astuple, dataclass

from polyreme.mesh import Plan
from polyreme.mesh.schedule import make_schedule
from polyreme.recipes.config import ModelConfig, PretrainConfig


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what holds them."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts, bytes."""
        return sum(astuple(self))


def num_parameters(model: ModelConfig) -> int:
    """Trained numbers of the model, embeddings included.

    gpt: two LayerNorms with bias, biased linears, learned positions; llama: two RMSNorms, no biases, rotary positions.
    """
    hidden, ffn, vocab = model.hidden_size, model.ffn_size, model.vocab_size
    head = 0 if model.tie_embeddings else vocab * hidden
    if model.family == "llama":
        kv = model.num_kv_heads * (hidden // model.num_heads)
        block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
        return vocab * hidden + model.num_layers * block + hidden + head
    attention = 4 * hidden * hidden + 4 * hidden
    block = attention + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return (vocab + model.seq_len) * hidden + model.num_layers * block + 2 * hidden + head


def flops_per_token(model: ModelConfig) -> int:
    """FLOP to train on one token, forward and backward: 6 per matmul parameter + 12 layers hidden seq for attention.

    Source: PaLM, arXiv:2204.02311, appendix B. Table look-ups do no arithmetic; the output projection
    does, tied or not.
    """
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    positions = model.seq_len * model.hidden_size if model.family == "gpt" else 0
    matmul = num_parameters(model) - tables - positions + model.vocab_size * model.hidden_size
    return 6 * matmul + 12 * model.num_layers * model.hidden_size * model.seq_len


def memory(config: PretrainConfig) -> Memory:
    """Bytes per device while training: fp32 parameters, gradients and two Adam moments, activations, logits.

    ZeRO stage 1 splits the moments over the sharding axis, 2 also the gradients, 3 also the parameters. Activations:
    34 bytes per layer, token and hidden unit in 16 bits, of which 24 are split over mp (arXiv:2205.05198, equation 2,
    without the attention matrix, which is never stored). Recompute full_attn spares the 8 of q, k, v and their result;
    full keeps one input per layer and one whole layer. A pipeline stage has its share of parameters and layers, and the
    activations of as many microbatches as its schedule keeps at once.
    """
    model, plan, train = config.model, config.plan, config.train
    count = num_parameters(model)
    per_mp = -(-count // (plan.mp * plan.pp))
    split = [-(-per_mp // plan.sharding) if plan.sharding_stage >= stage else per_mp for stage in (1, 2, 3)]
    tokens = config.tokens_per_step // (train.accumulation * plan.dp * plan.sharding * plan.sep)
    width = 4 if train.amp_level == "O0" else 2
    split_over_mp = 16 if plan.recompute == "full_attn" else 24
    layer = tokens * model.hidden_size * (10 + split_over_mp // plan.mp) * width // 2
    kept = tokens * model.hidden_size * width
    held = -(-model.num_layers // plan.pp) * _live_microbatches(config.parallel_plan)
    layers = int(held * kept + layer if plan.recompute == "full" else held * layer)
    # a low-precision copy of the weights lives beside the fp32 master under O2
    low_copy = 2 * split[2] if train.amp_level == "O2" else 0
    return Memory(
        parameters=4 * split[2] + low_copy,
        gradients=4 * split[1],
        optimizer=0 if "state" in plan.offload else 8 * split[0],
        activations=layers,
        logits=4 * tokens * model.vocab_size // plan.mp,
    )


def _live_microbatches(plan: Plan) -> float:
    """Most microbatches whose activations a stage keeps at once."""
    if plan.schedule is None:
        return 1.0
    stages = plan.mesh.pp
    schedule = make_schedule(plan.schedule, stages, plan.num_microbatches, plan.virtual_stages)
    return max(schedule.peak_live(stage) for stage in range(stages)) / plan.virtual_stages


def bytes_text(nbytes: float) -> str:
    """Bytes as a person reads them.

    >>> bytes_text(1536), bytes_text(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
