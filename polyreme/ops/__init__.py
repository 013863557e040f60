"""polyreme.ops"""
