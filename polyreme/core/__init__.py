"""polyreme.core"""
