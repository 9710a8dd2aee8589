"""Where the time of a step goes: PyTorch's profiler over a few steps, kernels summed by kind, and the roofline."""

import gzip
import json
import re
from collections import Counter

import torch

from common.cli import UserError
from observe import figures
from observe.measure import SETTLING_STEPS
from optim.schedules import accumulation_steps

IDLE = "idle"
REST = "Python, compiled"  # on a CPU: what is in no operation, such as the kernels that torch.compile wrote
COMMUNICATION = "communication"
# A kernel is of the first kind whose pattern its name matches. Names that Inductor gives list the operations it fused.
KINDS = {
    COMMUNICATION: r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d::",
    "loss": r"log_?softmax|cross_entropy|^(?!triton).*nll_loss",
    "attention": r"flash|fmha|sdpa|cudnn::fusion|attention|softmax",
    "optimizer": r"adam|multi_tensor_apply|foreach|lpnorm|linalg_vector_norm",
    "normalization": r"layer_?norm|gammabeta|rowwisemoments",
    "matrix products": r"^(?!triton_(poi|red|per)).*(gemm|gemv|nvjet|cutlass|cublas|splitk|addmm|::b?mm|linear|matmul)",
    "copies": r"mem(cpy|set)|direct_copy|copy_kernel|catarray|aten::(copy_|cat|clone|fill_|zero_)"
    r"|^triton_poi_fused_(_to_copy|clone|view|transpose|permute|cat|split|_unsafe|t|_)+(_\d+)?$",
    "element-wise": r"",
}


def kind_of(kernel):
    """The kind of a GPU kernel, or of an operation on a CPU, by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower()))


def check_steps(config, step):
    """Raises UserError if a run at `step` ends, or is interrupted, before --profile has traced its steps."""
    traced = range(step + SETTLING_STEPS, step + SETTLING_STEPS + config.profile)
    if config.profile and config.max_steps < traced.stop:
        raise UserError(
            f"--profile {config.profile} starts after {SETTLING_STEPS} steps: use --max_steps {traced.stop} or more"
        )
    for name in ("val_every", "hellaswag_every", "sample_every", "checkpoint_every"):
        every = getattr(config, name)
        if every and any(step % every == 0 for step in traced):
            raise UserError(f"--{name} {every} falls among the steps that --profile traces: use --{name} 0")


def start(config, model_config, log, step):
    """A running profiler for config.profile steps, SETTLING_STEPS after `step`: call its step() when each is over.

    When they are over it prints the table and writes trace.json.gz, profile.json and, for a compiled run in 16 bits on
    a GPU whose peaks are known, roofline.png to the run's folder. What lies between the steps is traced with them.
    """
    steps = config.profile
    gpu = log.device.type == "cuda"
    world_size = log.facts["world_size"]

    def report(profile):
        trace = log.folder / "trace.json.gz"
        profile.export_chrome_trace(str(trace))
        seconds, kinds = gpu_time(read_trace(trace)) if gpu else cpu_time(profile)
        roof = gpu_roof(log.device, log.peak_flops and log.peak_flops / world_size)
        if not config.compile or config.autocast == "off" or config.fp8:
            roof = None  # the peak and the bytes are those of 16 bits, and of fused operations
        accumulated = [accumulation_steps(step + SETTLING_STEPS + i, config, world_size) for i in range(steps)]
        tokens = sum(accumulated) / steps * config.micro_batch_size * config.seq_len
        table = make_table(kinds, seconds, steps, roof, work(model_config, config.seq_len, tokens))
        (log.folder / "profile.json").write_text(json.dumps(dict(steps=steps, roof=roof, kinds=table), indent=2) + "\n")
        if roof:
            figures.roofline(table, *roof, log.facts, log.folder / "roofline.png")
        print_table(table, steps, seconds, "GPU time by kind of kernel" if gpu else "time by kind of operation", roof)
        print(f"trace: {trace} (open it in https://ui.perfetto.dev)")

    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
    schedule = torch.profiler.schedule(wait=SETTLING_STEPS - 1, warmup=1, active=steps, repeat=1)
    profile = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=report, acc_events=True)
    profile.start()
    return profile


def make_table(kinds, seconds, steps, roof, work):
    """{kind: row}, the largest first: ms a step and share of the time; under a roof also FLOP/byte, TFLOP/s, of_roof.

    kinds: seconds by kind, of `seconds` in all, in `steps` steps; roof: gpu_roof's; work: a step's, as from work().
    """
    table = {kind: dict(ms=1000 * s / steps, share=s / seconds) for kind, s in kinds.most_common()}
    for kind, (flops, moved) in work.items() if roof else ():
        if kind in table and moved:
            reached, intensity = flops / table[kind]["ms"] * 1000, flops / moved
            of_roof = reached / min(roof[0], intensity * roof[1])
            table[kind] |= dict(flop_per_byte=intensity, tflops=reached / 1e12, of_roof=of_roof)
    return table


def print_table(table, steps, seconds, title, roof):
    """One line a kind."""
    print(f"profile of {steps} steps of {1000 * seconds / steps:.2f} ms, the tracing included: {title}")
    columns = f" {'FLOP/byte':>10s} {'TFLOP/s':>8s} {'of roof':>8s}" if roof else ""
    print(f"{'':16s} {'ms a step':>10s} {'share':>7s}{columns}")
    for kind, row in table.items():
        text = f"{kind:16s} {row['ms']:10.2f} {row['share']:7.1%}"
        if "tflops" in row:
            text += f" {row['flop_per_byte']:10.1f} {row['tflops']:8.1f} {row['of_roof']:8.0%}"
        print(text)
    if roof:
        print(f"roof: {roof[0] / 1e12:g} TFLOP/s, {roof[1] / 1e9:,.0f} GB/s")
    else:
        print("(how close to the hardware's roof: of compiled runs in 16 bits, on a GPU whose peaks are known)")


def read_trace(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def gpu_time(events):
    """Seconds from the first traced step's start to the last one's end, and a Counter of seconds by kind of kernel.

    events: those of a Chrome trace. Communication counts where no other kernel runs at the same time, so that all kinds
    and IDLE add up to the whole (kernels of other streams that overlap each other would count twice).
    """
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in marks), max(e["ts"] + e["dur"] for e in marks)
    kinds = Counter()
    spans = {True: [], False: []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = kind_of(event["name"])
            # the update of the step before is still running at the beginning, that of the last step at the end
            first, last = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
            if first < last:
                spans[kind == COMMUNICATION].append((first, last))
                if kind != COMMUNICATION:
                    kinds[kind] += (last - first) / 1e6
    computing, busy = covered(spans[False]), covered(spans[False] + spans[True])
    if spans[True]:
        kinds[COMMUNICATION] = (busy - computing) / 1e6
    kinds[IDLE] = (end - begin - busy) / 1e6
    return (end - begin) / 1e6, kinds


def covered(spans):
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def cpu_time(profile):
    """As gpu_time, on a CPU: time in operations, less that of the operations they call; what remains is REST."""
    averages = profile.key_averages()
    seconds = sum(e.cpu_time_total for e in averages if e.key.startswith("ProfilerStep")) / 1e6
    kinds = Counter()
    for event in averages:
        if "::" in event.key:
            kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    kinds[REST] = seconds - sum(kinds.values())
    return seconds, kinds


# ----------------------------------------------------------------------------------------------------------------------
# Roofline (Williams, Waterman, Patterson 2009)


def gpu_roof(device, peak_flops):
    """The GPU's peaks in FLOP/s and in bytes/s of memory traffic, or None where one is unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    if not (peak_flops and clock and width):
        return None
    return peak_flops, 2 * clock * 1e3 * width / 8  # two transfers a clock


def work(c, T, tokens):
    """What a step has to do: {kind: (FLOPs, bytes)}, for `tokens` tokens in sequences of T and a GPTConfig c.

    Bytes are those that cannot be avoided when every operation reads its inputs and writes its outputs once, forward
    and backward: 2 for activations, 4 for the residual stream without bf16_residual and in the optimizer; the weights
    are left out (1% of a micro-batch of 64 × 1024 tokens). FLOPs of all but matrix products and attention are counted
    roughly by hand; where bandwidth is the roof they cancel out. Attention that is written out has its products among
    the matrix products, like its kernels.
    """
    L, C, H, V, e = c.n_layer, c.n_embd, c.n_head, c.vocab_size, 2
    stream = 2 if c.bf16_residual else 4
    products = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] * L + [(C, V)]  # (in, out) of each linear layer
    # GELU: in and out; in and gradient in, gradient out. fused_gelu: the products' second output, then third input
    gelu, in_products = (0, 2) if c.fused_gelu else (5, 0)
    weights = 12 * L * C * C + (V + T) * C
    norms = 2 * L + 1
    # flash: two products forward and five backward, over the half of the T × T scores that is causal (Dao 2023,
    # FlashAttention-2); in q, k, v, out y; then in q, k, v, y and its gradient, out three gradients
    attention = (7 * tokens * T * C * L, 12 * e * tokens * C * L)
    written_out = (0, 0)
    if not c.flash:
        # two and four products over all scores, each with one T × T operand; softmax: in, out; out, gradient in, out
        written_out = (6 * 2 * tokens * T * C * L, 6 * e * tokens * (H * T + 2 * C) * L)
        attention = (9 * tokens * H * T * L, 5 * e * tokens * H * T * L)
    return {
        # forward, the inputs' gradients and the weights': three products of one size each, over the step's activations
        "matrix products": (
            sum(3 * 2 * tokens * n_in * n_out for n_in, n_out in products) + written_out[0],
            sum(3 * e * tokens * (n_in + n_out) for n_in, n_out in products)
            + written_out[1]
            + in_products * e * tokens * 4 * C * L,
        ),
        "attention": attention,
        # the logits: read for the softmax's sum, read again unless they are in the cache still, overwritten by their
        # gradient
        "loss": (8 * tokens * V, (2 if c.fused_cross_entropy else 3) * e * tokens * V),
        # with the residual addition. Forward: stream and branch in, stream and normalized out. Backward: stream and two
        # gradients in; the stream's gradient out, and where it has more bytes once more for the branch's products
        "normalization": (
            20 * tokens * C * norms,
            (5 * stream + 3 * e + (e if stream > e else 0)) * tokens * C * norms,
        ),
        "element-wise": (20 * tokens * 4 * C * L, gelu * e * tokens * 4 * C * L),
        # clipping reads the gradient; AdamW reads weight, gradient and two moments, and writes all but the gradient
        "optimizer": (16 * weights, 32 * weights),
    }
