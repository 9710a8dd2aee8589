"""What a run tells: logs, wandb, profiler, figures, measurements."""
