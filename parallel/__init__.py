"""The process group, and how a model is spread over ranks."""
