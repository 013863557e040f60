"""polyreme.metric"""
