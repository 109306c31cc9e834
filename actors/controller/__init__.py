"""Drives the stages: layout, rendezvous, steps, validation, checkpoints, records."""
