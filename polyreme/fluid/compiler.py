"""fluid.compiler: CompiledProgram and its strategies, as polyreme.static has them."""

from polyreme.static.compiled import BuildStrategy, CompiledProgram, ExecutionStrategy

__all__ = ["BuildStrategy", "CompiledProgram", "ExecutionStrategy"]
