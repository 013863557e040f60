"""polyreme.jit"""
