"""Saving, resuming, and other people's formats."""
