#!/bin/bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
# Usage, in the project's folder on a disk that all machines share:
#   uv sync --frozen --extra gpu && source .venv/bin/activate && python fineweb.py    # once, on a login node
#   sbatch --nodes=2 clusters/slurm.sh [flags of train_gpt2.py]
# SLURM sends SIGUSR1 to this script three minutes before the time limit. The script tells every rank to save and stop,
# and requeues the job. The requeued job has the same id, so it has the same run name and continues the run.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170  # seconds for saving, instead of 30
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restarted rank reads no address of a dead process

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

again() {
    scancel --signal=TERM "$SLURM_JOB_ID"  # signals the job's steps, not this script
    wait "$ranks" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap again USR1

# kill-on-bad-exit=0: torchrun exits with code 1 after a signal, while other machines may still be writing a checkpoint
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=3 \
    --rdzv_backend=c10d --rdzv_endpoint="$first:29500" --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    train_gpt2.py --run_name "gpt2-$SLURM_JOB_ID" "$@" &
ranks=$!
wait "$ranks"
