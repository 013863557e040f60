"""Uses of a trained model: generating text, chatting, measuring, compressing, exporting."""
