"""What scripts use of PaddlePaddle's insides, by polyreme's own functions. names.py and paths.py say where each is."""
