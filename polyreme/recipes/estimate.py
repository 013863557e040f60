"""The cost of a configuration from its dimensions alone: parameters and FLOP; memory is predicted by the planner."""

from polyreme.models import families
from polyreme.models.families import FAMILIES
from polyreme.planner import ModelShape
from polyreme.recipes.config import ModelConfig, RunConfig
from polyreme.recipes.finetune_config import FinetuneConfig


def shape_of(model: ModelConfig) -> ModelShape:
    """The planner's view of a configured model.

    >>> shape_of(ModelConfig.model_validate({})).num_parameters
    4240896
    """
    return families.shape_of(model.family, model)


def num_parameters(model: ModelConfig) -> int:
    """Trained numbers of the model, embeddings included."""
    cost = FAMILIES[model.family].cost
    return shape_of(model).num_parameters if cost is None else cost(model).parameters


def run_flops_per_token(config: RunConfig) -> int:
    """flops_per_token of what a run trains: where adapters alone do, no gradient of a weight is computed, which is a
    third of it. Source: LoRA, arXiv:2106.09685, section 4.2."""
    flops = flops_per_token(config.dimensions)
    is_lora = isinstance(config, FinetuneConfig) and config.fine_tuning == "lora"
    return flops * 2 // 3 if is_lora else flops


def flops_per_token(model: ModelConfig) -> int:
    """FLOP to train on one token, forward and backward, by the family's own formula, or 6 per matmul parameter that
    works on it, + 12 layers hidden seq for attention.

    Source: PaLM, arXiv:2204.02311, appendix B. Table look-ups do no arithmetic; the output projection
    does, tied or not, once for each token that is predicted.
    """
    cost = FAMILIES[model.family].cost
    if cost is not None:
        return cost(model).flops_per_token
    shape = shape_of(model)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    positions = (model.seq_len + shape.spare_positions) * model.hidden_size if shape.learned_positions else 0
    heads = (1 + shape.ahead) * model.vocab_size * model.hidden_size
    matmul = shape.num_active_parameters - tables - positions + heads
    return 6 * matmul + 6 * (model.num_layers + shape.ahead) * shape.score_width * model.seq_len
