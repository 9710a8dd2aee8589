"""Operators that PyTorch does not have, one file each. Triton and cuDNN are imported only by files that need them."""

import os

# Triton kernels fuse multiplications and additions, as Inductor's do; Triton 3.10 by itself does not
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
