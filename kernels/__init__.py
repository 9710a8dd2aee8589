"""Operators that PyTorch does not have, one file each. Triton is imported only by files that need it."""

import os

# Triton kernels fuse multiplications and additions, as Inductor's do: Triton 3.9's default, which 3.10 changes
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
