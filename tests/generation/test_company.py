"""Requests alone and in company, as `polyreme prove --serve` compares them."""

import pytest

from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.generation.company import check_company
from polyreme.mesh import Plan
from polyreme.models.decoders.llama import Llama, LlamaConfig


def nano(kind=Llama):
    rng.seed(5)
    return kind(LlamaConfig.nano(vocab_size=48, seq_len=48))


class Gossip(Llama):
    """What a row gives depends a little on the others."""

    def normed(self, x):
        return super().normed(x) + 1e-5 * x.mean(0, keepdim=True)


@pytest.mark.slow
def test_a_decoder_gives_the_same_bits_in_every_company():
    checks = list(check_company(nano(), end=[3]))
    assert [check.difference for check in checks] == [None] * 6
    assert [check.num_accepted > 20 for check in checks] == [False] * 4 + [True] * 2
    assert checks[2].num_known > checks[0].num_known
    assert max(check.num_preemptions for check in checks) > 0
    assert str(checks[0]).endswith("the same bits")


@pytest.mark.slow
def test_a_decoder_split_by_tensors_gives_the_same_bits_in_every_company():
    model = nano()
    apply_plan(Plan.from_degrees(mp=2, dp=4), model)
    try:
        assert [check.difference for check in check_company(model, end=[3])] == [None] * 6
    finally:
        clear_plan()


@pytest.mark.slow
def test_a_row_that_depends_on_others_is_told():
    differences = [check.difference for check in check_company(nano(Gossip), num_requests=4)]
    assert any("of request" in (difference or "") for difference in differences)
