"""The validation loss."""

import torch


@torch.no_grad()
def validation_loss(losses_of, stream, config, distributed):
    """Mean loss over the first val_steps * total_batch_size tokens of the stream, or over all: the same tokens for any
    micro-batch size and number of ranks."""
    B, T, device = config.micro_batch_size, config.seq_len, distributed.device
    sequences = min(config.val_steps * config.total_batch_size, stream.total - 1) // T
    sums = []
    for first in range(distributed.rank * B, sequences, distributed.world_size * B):
        n = min(B, sequences - first)
        tokens = torch.from_numpy(stream.read(first * T, n * T + 1)).to(device).long()
        x = torch.zeros((B, T), dtype=torch.long, device=device)
        y = torch.full_like(x, -1)  # rows after the last sequence have no targets and no loss
        x[:n], y[:n] = tokens[:-1].view(n, T), tokens[1:].view(n, T)
        sums.append(losses_of(x, y).float().sum())
    total = torch.stack(sums).cpu().double().sum() if sums else 0.0
    return distributed.all_reduce(total)[0] / (sequences * T)
