"""polyreme.models"""
