"""Shards of tokens, the loader that feeds a rank, the tokenizer and the demo's corpus."""
