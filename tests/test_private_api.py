"""Private API of PyTorch and FlashAttention-4: names that begin with an underscore, and ATen's operators.

Any release may change them. Each use stands here, and its test says in one sentence what has changed, without a GPU.
"""

import ast
import contextlib
import importlib.metadata
import inspect
import pkgutil
import re
from collections import defaultdict

import pytest
import torch
import torch.nn.attention.varlen  # registers its operator
from conftest import ROOT
from test_wall import ORDER
from torch.fx.operator_schemas import get_signature_for_torch_op

from optimizations import saved_operators
from parallel.activation_checkpointing import COLLECTIVES, GEMMS

USES = {
    ("kernels/documents.py", "torch._dynamo.mark_dynamic"): "one graph for any number of documents",
    ("kernels/flash4.py", "flash_attn.cute.interface._flash_attn_bwd"): "a backward with packed gradients",
    ("kernels/flash4.py", "torch.ops.aten._scaled_dot_product_cudnn_attention"): "a forward with the log-sum-exp",
    ("kernels/fp8_head.py", "torch.ops.aten.embedding_dense_backward"): "the targets' part of the head's gradient",
    ("kernels/mlp.py", "torch.ops.aten.gelu_backward"): "GELU's gradient where cuBLASLt has no epilogue",
    ("kernels/tuned_gemms.py", "torch._inductor.custom_graph_pass.CustomGraphPass"): "a pass over compiled graphs",
    ("kernels/tuned_gemms.py", "torch.ops.aten.addmm.default"): "GEMMs that --tuned_gemms replaces",
    ("kernels/tuned_gemms.py", "torch.ops.aten.mm.default"): "GEMMs that --tuned_gemms replaces",
    ("measure/profile.py", "torch.cuda.memory._dump_snapshot"): "--memory_snapshot",
    ("measure/profile.py", "torch.cuda.memory._record_memory_history"): "--memory_snapshot",
    ("measure/timing.py", "torch.cuda._sleep"): "a busy GPU while kernels are queued",
    ("parallel/context.py", "torch.distributed._functional_collectives.all_to_all_single"): "--context",
    ("parallel/gradients.py", "torch._dynamo.config.optimize_ddp"): "--overlap_gradients",
}
# In strings: the option of torch.compile, and operators whose outputs selective activation checkpointing keeps
OPTIONS = {("kernels/compile.py", "torch._inductor.config.post_grad_custom_post_pass"): "--tuned_gemms"}
KEPT = (*GEMMS, *(f"_c10d_functional::{name}" for name in COLLECTIVES), *saved_operators())


def find_uses():
    """{(file, name): calls}: attributes and modules with a leading underscore, and ATen's operators; but not of self.
    calls: for each call with arguments that can be counted, (number of positional arguments, keywords)."""
    uses = defaultdict(list)
    for path in (*ROOT.glob("*.py"), *(path for name in ORDER for path in (ROOT / name).glob("*.py"))):
        file, tree, imported = str(path.relative_to(ROOT)), ast.parse(path.read_text()), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "flash_attn")):
                for alias in node.names:
                    if "._" in (name := f"{node.module}.{alias.name}"):
                        imported[alias.asname or alias.name] = name
                        uses[file, name]
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name | ast.Attribute) or id(node) in inner:
                continue
            name = imported.get(ast.unparse(node), re.sub(r"^aten\.", "torch.ops.aten.", ast.unparse(node)))
            own = name.startswith(("self.", "cls.", "os.", "sys."))
            if own or not re.search(r"\._(?!_)|\.aten\.", name) or not re.fullmatch(r"[\w.]+", name):
                continue
            call = calls.get(id(node))
            if call and not any(isinstance(each, ast.Starred) for each in call.args):
                uses[file, name].append((len(call.args), [each.arg for each in call.keywords if each.arg]))
            uses[file, name]
    return uses


FOUND = find_uses()


def test_every_use_is_listed():
    assert set(FOUND) == set(USES)


def signatures(function):
    """The signatures of a function of Python or of an operator; none of anything else."""
    if inspect.isfunction(function):
        return [inspect.signature(function)]
    return get_signature_for_torch_op(function) if "torch._ops" in str(type(function)) else []


def accepts(function, count, keywords):
    """Whether a function may be called with this many positional arguments and these keywords. Where it passes any
    keyword on, its documentation has them."""
    for signature in signatures(function):
        try:
            bound = signature.bind_partial(*[None] * count, **dict.fromkeys(keywords))
        except TypeError:
            continue
        return all(f"{name} (" in function.__doc__ for name in bound.kwargs if name not in signature.parameters)
    return not signatures(function)


def test_a_call_with_other_arguments_is_not_accepted():
    record, gelu_backward = torch.cuda.memory._record_memory_history, torch.ops.aten.gelu_backward
    assert accepts(record, 0, ["stacks"]) and not accepts(record, 0, ["frames"])
    assert accepts(gelu_backward, 2, ["approximate"]) and not accepts(gelu_backward, 3, ["approximate"])
    assert not accepts(gelu_backward, 2, ["tanh"])


@pytest.mark.parametrize("file, name", USES | OPTIONS)
def test_a_name_has_the_signature_that_its_use_needs(file, name):
    package, used_for = name.partition(".")[0], (USES | OPTIONS)[file, name]
    pytest.importorskip(package)
    version = importlib.metadata.version({"flash_attn": "flash-attn-4"}.get(package, package))
    function = missing = object()
    with contextlib.suppress(AttributeError, ImportError):
        function = pkgutil.resolve_name(name)
    if function is missing:
        pytest.fail(f"{package} {version} has no {name}, which {file} uses for {used_for}", pytrace=False)
    for count, keywords in FOUND.get((file, name), ()):
        if not accepts(function, count, keywords):
            call = f"{name}({', '.join(['_'] * count + [f'{keyword}=' for keyword in keywords])})"
            pytest.fail(f"{package} {version} refuses {call}, which {file} calls for {used_for}", pytrace=False)


@pytest.mark.parametrize("name", [name for name in KEPT if not name.startswith("gpt2::")])
def test_an_operator_whose_output_is_kept_exists(name):
    namespace, operator = name.split("::")
    if not hasattr(getattr(torch.ops, namespace), operator):
        reason = "whose output --activation_checkpointing selective keeps"
        pytest.fail(f"PyTorch {torch.__version__} has no {name}, {reason}", pytrace=False)
