"""CUDA C++ kernels: they compile without a GPU, and on a GPU they compute what PyTorch computes."""

import pytest
import torch
from conftest import expect_error

from measure import matmul, nvrtc

CUDA = torch.device("cuda")


def gelu():
    pytest.importorskip("triton")
    from measure import gelu

    return gelu


def test_every_kernel_compiles():
    pytest.importorskip("cuda.core", reason="needs requirements-gpu.txt")
    names = [(matmul.SOURCE, name) for name, *_ in matmul.KERNELS.values()]
    for source, name in (*names, (gelu().SOURCE, "gelu<false>"), (gelu().SOURCE, "gelu<true>")):
        assert nvrtc.machine_code(source, name, (8, 0)).code[1:4] == b"ELF"


@pytest.mark.gpu
@pytest.mark.parametrize("name", matmul.KERNELS)
def test_products(name):
    if reason := nvrtc.missing(CUDA):
        pytest.skip(reason)
    A, B = torch.randn(2, 384, 384, device=CUDA)
    exact = A.double() @ B.double()
    assert (matmul.multiply(name, A, B) - exact).norm() < 1e-6 * exact.norm()
    result = matmul.measure(A, B, 1, name)
    assert result["rate"] * 1e9 * result["forward_ms"] == pytest.approx(2 * 384**3)


def test_it_needs_an_nvidia_gpu(call_main):
    expect_error(call_main("measure/matmul.py", "--device", "cpu"), "CUDA C++ is for NVIDIA GPUs, not cpu")
