"""Kernels beside PyTorch's own, and the libraries that they call."""
