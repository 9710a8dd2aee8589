"""Operators that PyTorch does not have, one file each. Triton and cuDNN are imported only by files that need them."""
