"""Observing a run: logs, wandb, the plan and the summary, the profiler, figures, measurements."""
