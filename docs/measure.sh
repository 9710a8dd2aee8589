#!/usr/bin/env bash
# Repeats the measurements of the documentation on this machine.
#
#   bash docs/measure.sh DATA_DIR RESULTS MEASUREMENT...      in the project's folder, with its environment active
#
# DATA_DIR has shards of fineweb.py. RESULTS gets a file for each measurement; NAME.txt has its table. One that is
# interrupted starts again. GPUS (the default: all) and SEEDS (4) are environment variables.
#
# One GPU:       attention kernels long_context masking states fp16 start fp8_loss
# Several GPUs:  splits slow_links links muon parity
set -uo pipefail
data=$1 results=$(realpath -m "$2")
shift 2
mkdir -p "$results"
gpus=${GPUS:-$(python -c "import torch; print(max(1, torch.cuda.device_count()))")}
torchrun="python -m torch.distributed.run --standalone --nproc_per_node=$gpus"

# bench LAUNCHER FLAGS...: bench.py's result, after its flags and the seconds since this script's start
bench() {
    local launcher=$1
    shift
    echo "$SECONDS s: bench.py $*"
    $launcher bench.py --steps "${STEPS:-6}" "$@" 2>&1 | grep -E "tokens/sec|^peak|rror|first step"
}

# recipes NAME FLAGS...: final losses over the seeds, and time to a loss
recipes() {
    local name=$1
    shift
    python ladder.py --to_loss --data_dir "$data" --wandb disabled --val_tokens 1048576 --seeds "${SEEDS:-4}" \
        --log_dir "$results" --run_name "$name" "$@"
}

attention() { python -m observe.attention --log_dir "$results" --run_name attention_table; }
kernels() { python -m observe.kernels --log_dir "$results" --run_name kernels_table; }
links() { $torchrun -m observe.links --log_dir "$results" --run_name links_table; }

long_context() {
    for length in 4096 8192 16384 32768 65536 131072; do
        for checkpointing in off selective full; do
            size=$((length < 65536 ? 65536 / length : 1))
            bench python --seq_len $length --micro_batch_size $size --activation_checkpointing $checkpointing
        done
    done
}

masking() {
    for _ in 1 2; do
        bench python
        bench python --mask_documents
    done
    recipes masking_loss --optimizer muon --total_batch_size 262144 --max_steps 64 --recipes mask_documents=on
}

states() {
    for _ in 1 2; do
        for states in float32 bf16 int8; do bench python --adamw_states $states; done
    done
}

fp16() {
    bench python --no_bf16_residual
    bench python --autocast fp16
    SEEDS=1 recipes fp16_loss --no_bf16_residual --max_steps 40 --recipes autocast=fp16
}

fp8_loss() { recipes fp8_loss --optimizer muon --max_steps 111 --recipes fp8=on fp8_head=on; }

# With an empty and with a filled cache of torch.compile
start() {
    rm -rf "$results/cache"
    export TORCHINDUCTOR_CACHE_DIR=$results/cache TRITON_CACHE_DIR=$results/cache
    for _ in 1 2; do
        began=$(date +%s%N)
        STEPS=1 bench python
        echo "whole process: $((($(date +%s%N) - began) / 1000000)) ms"
    done
    python -X importtime -c "import train_gpt2" 2>&1 | sort -t'|' -k2 -n | tail -n 12
}

large="--n_layer 32 --n_head 32 --n_embd 4096 --seq_len 4096 --total_batch_size 131072 --activation_checkpointing full"

splits() {
    for flags in "" "--parallel zero2" "--parallel zero3" "--tensor 2" "--context 2" "--pipeline 2" \
        "--pipeline 2 --stages_per_rank 2"; do
        bench "$torchrun" $flags
    done
    for flags in "" "--parallel zero3" "--context 2" "--pipeline 2"; do
        bench "$torchrun" --model gpt2-xl --total_batch_size 262144 $flags
    done
    for flags in "--parallel zero3" "--tensor 2" "--pipeline 2" "--pipeline 2 --stages_per_rank 2"; do
        STEPS=2 bench "$torchrun" $large $flags
    done
    for flags in "" "--context 2" "--context 2 --parallel zero3" "--tensor 2"; do
        bench "$torchrun" --seq_len 32768 --activation_checkpointing full $flags
    done
}

slow_links() {
    export NCCL_P2P_DISABLE=1
    for flags in "" "--overlap_gradients" "--parallel zero3" "--tensor 2" "--context 2" "--pipeline 2"; do
        STEPS=3 bench "$torchrun" $flags
    done
}

# Of the optimizer alone: with a learning rate of nearly 0 the weights, and the power of the same kernels, are the same
muon() {
    for _ in 1 2 3; do
        bench "$torchrun" --lr 1e-8
        bench "$torchrun" --optimizer muon --lr 1e-8 --adamw_lr 1e-8
    done
}

# Ten losses and gradient norms of every mode in float32, beside those of one GPU
parity() {
    local small="--model tiny --data_dir $data --seq_len 256 --total_batch_size 16384 --max_steps 10 --autocast off"
    small+=" --no_tf32 --compile --micro_batch_size 4"
    small+=" --wandb disabled --val_every 0 --sample_every 0 --checkpoint_every 0"
    ten() {
        local launcher=$1
        shift
        echo "$SECONDS s: ${launcher##*=} train_gpt2.py $*"
        $launcher train_gpt2.py $small --log_dir "$results" --run_name "parity$SECONDS" "$@" 2>&1 |
            awk '/rror/ {print} /^step/ {printf "%s (%s) ", $5, $11} END {print ""}'
    }
    ten python
    for mode in "" "--parallel zero2" "--parallel zero3" "--parallel hsdp --shard_ranks $gpus" "--tensor 2" \
        "--context 2" "--context 2 --parallel zero3" "--pipeline 2" "--pipeline 2 --stages_per_rank 2"; do
        ten "$torchrun" $mode
    done
    ten python --optimizer muon
    for mode in "" "--parallel zero3" "--pipeline 2"; do ten "$torchrun" --optimizer muon $mode; done
}

for name in "$@"; do
    declare -F "$name" >/dev/null || { echo "there is no measurement $name" >&2 && exit 1; }
    "$name" 2>&1 | tee "$results/$name.txt"
done
