"""polyreme.static.passes: what makes another Program of a Program (see docs/passes.md)."""

from polyreme.fusion.pattern import Pattern
from polyreme.fusion.table import PATTERNS
from polyreme.program.passes.dead import dead_code, prune
from polyreme.program.passes.folding import constant_folding
from polyreme.program.passes.fusions import fusion
from polyreme.program.passes.identities import IDENTITIES, identity
from polyreme.program.passes.mixing import amp
from polyreme.program.passes.recomputing import recompute
from polyreme.program.passes.subexpressions import common_subexpression
from polyreme.program.passes.table import PASSES, Pass, apply, show

__all__ = [
    "IDENTITIES",
    "PASSES",
    "PATTERNS",
    "Pass",
    "Pattern",
    "amp",
    "apply",
    "common_subexpression",
    "constant_folding",
    "dead_code",
    "fusion",
    "identity",
    "prune",
    "recompute",
    "show",
]
