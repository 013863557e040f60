"""polyreme.vision"""
