"""polyreme.io"""
