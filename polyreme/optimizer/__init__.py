"""polyreme.optimizer"""
