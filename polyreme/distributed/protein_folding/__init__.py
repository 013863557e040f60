"""The names by which HelixFold's training says where its devices are: scg, dap, bp, dp.

Tensors are global here, so a script sees one rank that has everything, and each of these says where a Tensor lies; XLA
puts the communication there. `scg.init_process_group` makes a plan, `dp.param_sync` places a model by it.
docs/branches.md.
"""

from polyreme.distributed.protein_folding import bp, dap, dp
from polyreme.distributed.protein_folding.groups import scg

__all__ = ["bp", "dap", "dp", "scg"]
