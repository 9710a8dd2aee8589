"""What the peak memory of a training step is for, from the CUDA allocator's own history of one step.

The history has every allocation and free of a step in order, so the blocks that are allocated at the peak are known
exactly. A block's part follows from the tensor that owns it, from its size, or from the time of its allocation:

    weights             parameters of this rank
    gradients           their gradients
    optimizer_states    AdamW's moments, Muon's momentum
    logits              blocks of (tokens, vocabulary), which are logits, their softmax or their gradient
    activations         what else forward and backward allocate, such as weights cast to 16 bits or gathered by FSDP
    workspace           the rest: workspaces of libraries, temporary tensors of the update

https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import itertools

import torch

from common.dtensors import local
from parallel.memory import FP8_LOGIT_ROWS, LOGIT_ROWS

ALIGNMENT = 256  # columns, at most, by which the vocabulary is padded in memory


def memory_of_step(step, model, optimizer, config):
    """(what step() returns, {part: GB (2**30)} at its peak) of a training step, a function, on this process's GPU.

    The parts are empty on other devices, and with the allocator cudaMallocAsync, which keeps no history.
    model: a GPT; optimizer: its optimizer, which step() steps; config: a resolved Config.
    """
    if config.device != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return step(), {}
    held = held_before(model, optimizer, torch.cuda.memory_allocated())
    backward_events, gradients = None, {}  # fp16's loss scaling may skip the update

    def end_backward(*_):
        nonlocal backward_events, gradients
        backward_events = len(read_history())
        gradients = storages(parameter.grad for parameter in model.parameters())

    hook = optimizer.register_step_pre_hook(end_backward)
    torch.cuda.memory._record_memory_history(context=None, stacks="python")  # context=None: no stacks
    result = step()
    events = read_history()
    torch.cuda.memory._record_memory_history(enabled=None)
    hook.remove()
    if backward_events is None:
        backward_events = len(events)
    parts = parts_at_peak(held, events, backward_events, gradients, lambda size: is_logits(size, model, config))
    return result, {part: size / 2**30 for part, size in parts.items()}


def held_before(model, optimizer, allocated):
    """{part: bytes} of the blocks that are allocated before a step; allocated: bytes of all of them."""
    parameters = list(model.parameters())
    states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    held = dict(
        weights=sum(storages(parameters).values()),
        gradients=sum(storages(parameter.grad for parameter in parameters).values()),  # DDP's buckets
        optimizer_states=sum(storages(state for state in states if state.device == parameters[0].device).values()),
    )
    return held | dict(activations=0, logits=0, workspace=allocated - sum(held.values()))


def storages(tensors):
    """{address: bytes} of the memory of these tensors; of a DTensor, this rank's part. None is left out."""
    memories = [local(tensor).detach().untyped_storage() for tensor in tensors if tensor is not None]
    return {memory.data_ptr(): memory.nbytes() for memory in memories}


def is_logits(size, model, config):
    """Whether a block of `size` bytes is a matrix of (tokens, vocabulary), of 1 (fp8_head), 2 or 4 bytes."""
    columns = model.config.vocab_size // config.tensor
    rows = config.micro_batch_size * config.seq_len // config.context
    if config.fp8_head:
        rows = min(rows, FP8_LOGIT_ROWS)  # its chunks are full, but for the last
    elif config.fused_cross_entropy:
        rows = -(-rows // -(-rows // LOGIT_ROWS))  # its chunks have equal numbers of rows
    widths = (1, 2, 4) if config.fp8_head else (2, 4)
    return any(columns <= size / (rows * width) <= columns + ALIGNMENT for width in widths)


def read_history():
    """The events of this process's GPU since its recording began."""
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]


def parts_at_peak(held, events, backward_events, gradients, is_logits):
    """{part: bytes} at the peak of a step's allocations; the sum is the peak.

    held: {part: bytes} that are allocated when the step begins. events: the step's, as in
    torch.cuda.memory._snapshot()["device_traces"]; the first backward_events of them end with backward. gradients:
    addresses of the gradients' blocks then. is_logits(bytes): whether a block is logits.
    """
    # PyTorch counts a block as free from its request on; "free_completed" may follow when another stream is done
    signs = dict(alloc=1, free_requested=-1)
    totals = list(itertools.accumulate(signs.get(event["action"], 0) * event["size"] for event in events))
    if not totals or max(totals) <= 0:
        return dict(held)
    peak = totals.index(max(totals))
    # an address may have belonged to another tensor at the peak: the allocation decides, not the address
    kept = {index for address, index in live_blocks(events[:backward_events]).items() if address in gradients}
    parts = dict(held)
    for index in live_blocks(events[: peak + 1]).values():
        size = events[index]["size"]
        if index in kept:
            part = "gradients"
        elif index >= backward_events:
            part = "workspace"
        else:
            part = "logits" if is_logits(size) else "activations"
        parts[part] += size
    # blocks from before the step that are free at the peak, such as the batch of the step before
    parts["workspace"] += sum(held.values()) + totals[peak] - sum(parts.values())
    return parts


def live_blocks(events):
    """{address: index of the event that allocated it} of the blocks that are allocated in `events` and not freed."""
    blocks = {}
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            blocks[event["addr"]] = index
        elif event["action"] == "free_requested":
            blocks.pop(event["addr"], None)
    return blocks


def describe_memory(peak_gb, parts):
    """One line: the peak memory of a process in GB, and the parts of a step's peak.

    Evaluations or compilation may need more than a step: the step's own peak is then named too.
    """
    step_gb = sum(parts.values())
    # the allocator rounds blocks up, by up to 1 MB each, and the parts are of the sizes that were requested
    of_step = "" if step_gb > 0.95 * peak_gb else f", {step_gb:.2f} GB in a step"
    named = ", ".join(f"{part.replace('_', ' ')} {size:.2f}" for part, size in parts.items())
    return f"peak memory {peak_gb:.2f} GB{of_step}: {named}"
