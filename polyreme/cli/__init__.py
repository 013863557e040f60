"""polyreme.cli"""
