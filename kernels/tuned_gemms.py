"""--tuned_gemms: the GEMMs of compiled graphs by the fastest of cuBLASLt's algorithms.

torch.compile leaves GEMMs to cuBLAS, which runs the algorithm that its heuristic ranks first. kernels/cublaslt.py times
all that the heuristic proposes. A pass over each graph that torch.compile has traced, of forward and of backward,
replaces aten.mm and aten.addmm by an operator that calls it. So the model and autograd do not know of it, and --tensor
and activation checkpointing work as without it.

Passes are documented in PyTorch's torch/_inductor/custom_graph_pass.py.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from kernels import cublaslt

aten = torch.ops.aten
# Choosing compares two results in memory; larger ones, such as all logits of a micro-batch, might not fit twice
MAX_TUNED_SIZE = 1 << 30


@torch.library.custom_op("gpt2::gemm", mutates_args=())
def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a b + bias. a (N, K), b (K, M), bias (M,), one dtype."""
    return cublaslt.mm(a, b, bias)


@gemm.register_fake
def _(a, b, bias=None):
    return a.new_empty(len(a), b.size(1))


class TuneGemms(CustomGraphPass):
    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is aten.mm.default:
                (a, b), biases = node.args, ()
            elif node.target is aten.addmm.default and not node.kwargs:
                *biases, a, b = node.args
            else:
                continue
            if is_tunable(node.meta["val"]) and all(bias.meta["val"].dim() == 1 for bias in biases):
                node.target, node.args = torch.ops.gpt2.gemm.default, (a, b, *biases)

    def uuid(self):
        """A key for torch.compile's cache."""
        return get_hash_for_files((__file__,))


def is_tunable(out):
    in_half = out.dtype in (torch.bfloat16, torch.float16)
    return in_half and cublaslt.MIN_TUNED_SIZE <= out.numel() <= MAX_TUNED_SIZE
