"""What is done with a trained model: writing, talking, measuring, compressing, exporting."""
