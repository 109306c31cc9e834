"""Discrete-event simulation of schedules: compile to tasks, run the ranks, reduce to numbers."""
