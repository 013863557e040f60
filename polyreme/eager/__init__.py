"""polyreme.eager"""
