"""polyreme.kernels"""
