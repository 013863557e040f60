"""Floor 1: what an op, a dtype, a device, a random generator and a Tensor's state are. Importing it configures jax."""

from polyreme.core.engine import backend as _backend
