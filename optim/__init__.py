"""The optimizer and its schedules."""
