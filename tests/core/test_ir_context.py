"""The main thread lowers programs in few MLIR contexts."""

import threading

import jax
import pytest
from jax.interpreters import mlir

from polyreme.core.engine import ir_context


@pytest.fixture
def contexts(monkeypatch):
    """A list of the contexts that modules are made in, from a first one on."""
    used, init = [], ir_context.reusing(mlir.ModuleContext.__init__.__wrapped__)

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        used.append(self.context)

    monkeypatch.setattr(mlir.ModuleContext, "__init__", noted)
    return used


pytestmark = pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax keeps contexts itself")


def lowered(count):
    return [jax.jit(lambda x, i=i: x * i).lower(1.0).as_text() for i in range(count)]


def test_a_context_lowers_many_programs_and_is_then_let_go(contexts):
    texts = lowered(ir_context.LOWERINGS + 1)
    assert [c is contexts[0] for c in contexts] == [True] * ir_context.LOWERINGS + [False]
    assert "dense<6.000000e+01>" in texts[60]


def test_other_threads_lower_in_contexts_that_end(contexts):
    lowered(2)
    thread = threading.Thread(target=lowered, args=(3,))
    thread.start()
    thread.join()
    assert len(set(map(id, contexts))) == 4


def test_a_jax_without_the_argument_is_left_alone(monkeypatch, caplog):
    def init(self, platforms):
        """What another jax may have."""

    monkeypatch.setattr(mlir.ModuleContext, "__init__", init)
    with caplog.at_level("INFO"):
        ir_context.reuse_contexts()
    assert mlir.ModuleContext.__init__ is init
    assert "of its own" in caplog.text


def test_a_program_lowered_within_another_has_a_context_of_its_own(contexts):
    lowered(1)
    with contexts[0]:
        lowered(1)
    assert contexts[1] is not contexts[0]
