"""Manifests of KubeRay for a run."""
