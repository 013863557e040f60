"""polyreme.nn"""
