"""polyreme.mesh"""
