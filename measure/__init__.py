"""The laboratory: everything that measures and that no run needs."""
