"""Smaller commands, a module each: checkpoints, logs, viewing runs, Grafana, submission of jobs, the demo."""
