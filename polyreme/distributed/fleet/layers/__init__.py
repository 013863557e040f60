"""polyreme.distributed.fleet.layers: the tensor-parallel layers live in mpu."""
