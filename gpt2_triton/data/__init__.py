"""Data: shards on disk, the order of samples, tokenizers, and the preparation of text."""
