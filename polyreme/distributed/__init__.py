"""polyreme.distributed"""
