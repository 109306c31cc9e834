"""Clusters and models by name (YAML beside this file); every figure with its source."""
