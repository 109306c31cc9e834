"""Ray clusters: a private one for a run (`session.py`, ended by `guardian.py`), jobs on a cluster that is
there (`submission.py`), manifests for Kubernetes (`kubernetes.py`).
"""
