"""The samples that runs read: files of tokens, conversations, pairs, sentences and alignments as batches."""
