import gzip
import json
import pickle

import pytest
import torch
from conftest import expect_error

from common.errors import UserError
from config import Config, check_traced_steps
from measure import profile


def test_seconds_by_category():
    """Two steps of 100 µs with 70 µs of GEMMs, 20 of attention, 40 of communication (half of it during a GEMM), and two
    optimizer updates, each with 5 µs in the two steps."""

    def event(name, start, duration, category="kernel"):
        return dict(cat=category, name=name, ts=1000 + start, dur=duration)

    events = [
        event("ProfilerStep#5", 0, 100, "user_annotation"),
        event("ProfilerStep#6", 100, 100, "user_annotation"),
        event("ProfilerStep#5", 5, 90, "gpu_user_annotation"),
        event("aten::mm", 0, 5, "cpu_op"),
        event("multi_tensor_apply_kernel", -10, 15),
        event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 10, 70),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 60, 40),
        event("void pytorch_flash::flash_fwd_kernel<...>", 110, 20),
        event("Memcpy HtoD (Pinned -> Device)", 140, 10, "gpu_memcpy"),
        event("multi_tensor_apply_kernel", 195, 15),
        event("Memcpy DtoH (Device -> Pinned)", 210, 2, "gpu_memcpy"),
        dict(name="process_name", ph="M"),
    ]
    total, seconds = profile.gpu_seconds(events)
    assert total == pytest.approx(200e-6)
    expected = {"matrix products": 70, "communication": 20, "attention": 20, "copies": 10, "optimizer": 10, "idle": 70}
    assert {category: s * 1e6 for category, s in seconds.items()} == pytest.approx(expected)
    with pytest.raises(UserError, match="no GPU kernel"):
        profile.gpu_seconds(events[:4])


@pytest.mark.parametrize(
    "name, category",
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>", "attention"),
        ("void at::native::cunn_SoftMaxBackward<4, float, float, float, LogSoftMaxBackwardEpilogue>", "loss"),
        ("triton_red_fused__log_softmax_prepare_softmax_online_19", "loss"),
        ("triton_per_fused__to_copy_add_embedding_native_layer_norm_nll_loss_forward_16", "normalization"),
        ("triton_per_fused_add_addmm_native_layer_norm_view_3", "normalization"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>", "normalization"),
        ("triton_poi_fused_gelu_gelu_backward_view_6", "element-wise"),
        ("triton_red_fused_cat_sum_transpose_view_12", "element-wise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("triton_poi_fused_cat_transpose_view_11", "copies"),
        ("triton_poi_fused__to_copy_5", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("aten::addmm", "matrix products"),
        ("aten::_log_softmax", "loss"),
        ("cross_entropy_softmax_kernel", "loss"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_categories(name, category):
    """Names from an H200 and a CPU, shortened."""
    assert profile.category_of(name) == category


def test_a_profiled_run(train):
    run = train("profile", "--profile", 2, "--max_steps", 7, ranks=2)
    found = json.loads((run / "profile.json").read_text())
    shares = {category: row["share"] for category, row in found["kinds"].items()}
    assert found["steps"] == 2 and sum(shares.values()) == pytest.approx(1)
    assert {"matrix products", "loss", "attention", "normalization", "optimizer", "element-wise"} < shares.keys()
    assert shares["matrix products"] > 0 and shares["loss"] > 0 and all(share > -0.01 for share in shares.values())
    events = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {
        event["args"]["name"].partition(":")[0]: event["pid"] for event in events if event["name"] == "process_name"
    }
    steps = {(event["name"], event["pid"]) for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {(f"ProfilerStep#{step}", names[f"rank {rank}"]) for step in (5, 6) for rank in (0, 1)}
    assert not list(run.glob("trace_rank_*"))
    output = (run / "output.txt").read_text()
    for category, row in found["kinds"].items():
        assert f"{category:16s} {row['ms']:10.2f} {row['share']:7.1%}\n" in output
    assert "profile of 2 steps" in output and "https://ui.perfetto.dev" in output and "step     6/7" in output
    assert "profiler_start" not in output  # Kineto's own log


def test_the_ranks_traces_become_one():
    """Two traces whose processes, GPUs and arrows have the same numbers, and whose times begin 5 µs apart."""

    def trace(base):
        process = dict(ph="M", name="process_name", ts=0, args=dict(name="python"))
        kernel = dict(ph="X", name="gemm", ts=10.0, dur=1, pid=0)
        return dict(
            baseTimeNanoseconds=base,
            traceEvents=[
                process | dict(pid=7),
                process | dict(pid=1),
                kernel,
                dict(ph="s", name="ac2g", ts=9, pid=7, id=3),
            ],
        )

    merged = profile.merge([trace(1000), trace(6000)])
    assert merged["baseTimeNanoseconds"] == 1000
    found = [(e["name"], e["pid"], e["ts"], e.get("id")) for e in merged["traceEvents"]]
    assert found == [
        ("process_name", 1001, 0, None),  # that of the GPU without events is left out
        ("gemm", 1000, 10, None),
        ("ac2g", 1001, 9, 3),
        ("process_name", 2001, 5, None),
        ("gemm", 2000, 15, None),
        ("ac2g", 2001, 14, 10**9 + 3),
    ]
    assert merged["traceEvents"][3]["args"]["name"] == "rank 1: python"


def test_a_run_that_ends_among_the_traced_steps(train):
    """In a process of its own, since a forked one skips the interpreter's exit, which a running profiler crashes."""
    wild = ("--profile", 12, "--max_steps", 30, "--lr", 1e30, "--grad_clip", 0)
    done = train("x", *wild, drop="--max_steps --lr", fails=True, env=dict(OMP_NUM_THREADS="1"))
    expect_error(done, "10 of the last 11 steps")
    assert "the run has ended among the steps of --profile" in done.stdout


def test_a_memory_snapshot_is_of_a_gpu():
    gpu = torch.device("cuda")
    check_traced_steps(Config(memory_snapshot=2, max_steps=7), 0, gpu)
    for words, flags, device in (
        ("this is cpu: leave it out", dict(memory_snapshot=2), torch.device("cpu")),
        ("--memory_snapshot 2 starts after 5 steps: use --max_steps 7", dict(memory_snapshot=2, max_steps=6), gpu),
        ("one at a time", dict(memory_snapshot=2, profile=2), gpu),
    ):
        with pytest.raises(UserError, match=words):
            check_traced_steps(Config(**flags), 0, device)


@pytest.mark.gpu
def test_a_memory_snapshot_has_allocations_with_their_stacks(tmp_path, capsys):
    snapshot = profile.MemorySnapshot(2, tmp_path)
    for _ in range(7):
        torch.zeros(1000, device="cuda")
        snapshot.step()
    content = pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())
    allocations = [event for event in content["device_traces"][0] if event["action"] == "alloc"]
    assert len(allocations) == 2 and allocations[0]["frames"] and str(tmp_path) in capsys.readouterr().out


def test_too_few_steps_to_profile(train):
    expect_error(train("x", "--profile", 2, "--max_steps", 6, fails=True), "--profile 2", "--max_steps 7")


def test_evaluations_are_not_profiled(train):
    expect_error(train("x", "--profile", 2, "--max_steps", 9, "--val_every", 3, fails=True), "--val_every 3")
