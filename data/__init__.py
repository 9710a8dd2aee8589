"""Tokens on disk, the order in which training reads them, the tokenizer."""
