"""What looks at a running training: logs, wandb, the plan, the ranks."""
