"""Moving factors from the inputs of maps into their weights leaves a model's function as it is, whatever its norms."""

import numpy as np
import pytest

from polyreme.compression.calibration import collect, maps_of
from polyreme.compression.scaling import apply_factors, scaled_inputs
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.models import AutoModelForCausalLM
from polyreme.nn import Linear
from tests.models import parity
from tests.models.test_published import FOLDERS


@pytest.mark.parametrize(("name", "count"), [("gemma2", 3), ("olmo2", 1), ("gpt_neox", 2), ("phi3", 3)])
def test_factors_do_not_change_what_a_model_computes(name, count):
    """Of norms that multiply by 1 + w, of blocks without norms before their parts, of parts in parallel."""
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name)
    tokens, rng = to_tensor(np.arange(13)[None] * 3), np.random.default_rng(0)
    with no_grad():
        want = model(tokens).numpy()
        maps = maps_of(model, "blocks.0")
        statistics = collect(model.blocks[0], lambda: model(tokens), maps)
        inputs = list(scaled_inputs("blocks.0", model.blocks[0]))
        for scaled in inputs:
            (first, *_) = scaled.maps
            apply_factors(scaled, rng.uniform(0.5, 2, maps[first].in_features).astype(np.float32), statistics)
        got = model(tokens).numpy()
    assert len(inputs) == count
    sizes = {key: getattr(model.config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * parity.tolerance(parity.forward_terms(sizes, 13), want))


def test_a_block_without_such_parts_has_no_inputs_to_scale():
    assert not list(scaled_inputs("blocks.0", Linear(2, 2)))
