"""polyreme.recipes"""
