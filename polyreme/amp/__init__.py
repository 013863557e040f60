"""polyreme.amp"""
