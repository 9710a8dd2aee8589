"""--tuned_gemms: the GEMMs of compiled graphs by the fastest of cuBLASLt's algorithms.

torch.compile leaves GEMMs to cuBLAS, which runs the algorithm that the heuristic of cuBLAS ranks first.
kernels/cublaslt.py times all that the heuristic proposes. A pass over each graph that torch.compile has traced, of
forward and of backward, replaces aten.mm and aten.addmm by gpt2::gemm, which calls cublaslt.mm. The pass runs after
autograd, activation checkpointing and --tensor have made the graphs, so none of them changes.

Passes are documented in PyTorch's torch/_inductor/custom_graph_pass.py.
"""

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from common.files import digest
from kernels import cublaslt

aten = torch.ops.aten
# About 0.1 ms on an H100. The host takes longer for a call than for torch.mm's, which counts where GEMMs are short.
MIN_FLOPS = 1 << 36
# Choosing compares two results in memory; larger ones, such as all logits of a micro-batch, might not fit twice
MAX_TUNED_SIZE = 1 << 30


@torch.library.custom_op("gpt2::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias. a (N, K), b (K, M), bias (M,), one dtype."""
    return cublaslt.mm(a, b, bias)


@gemm.register_fake
def _(a, b, bias=None):
    return a.new_empty(a.size(0), b.size(1))


class TuneGemms(CustomGraphPass):
    """The pass over a graph."""

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is aten.mm.default:
                (a, b), biases = node.args, ()
            elif node.target is aten.addmm.default and not node.kwargs:
                *biases, a, b = node.args
            else:
                continue
            x, out = a.meta["val"], node.meta["val"]
            if is_tunable(x, out) and all(bias.meta["val"].shape == out.shape[1:] for bias in biases):
                node.target, node.args = torch.ops.gpt2.gemm.default, (a, b, *biases)

    def uuid(self):
        """A key for torch.compile's cache."""
        return digest(__file__), MIN_FLOPS, cublaslt.MIN_TUNED_SIZE, MAX_TUNED_SIZE


def is_tunable(x, out):
    """Whether the GEMM of a matrix x (N, K) with the result out (N, M) is replaced."""
    size = out.numel()
    large = 2 * size * x.size(1) >= MIN_FLOPS and cublaslt.MIN_TUNED_SIZE <= size <= MAX_TUNED_SIZE
    return large and out.dtype == torch.bfloat16
