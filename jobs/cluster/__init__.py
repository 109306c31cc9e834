"""Ray clusters: a private one for a run (`session.py`, ended by `guardian.py`), jobs on an existing cluster
(`submission.py`), manifests for Kubernetes (`kubernetes.py`), scripts for Slurm (`slurm.py`).
"""
