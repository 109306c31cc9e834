"""Configurations that come with Braid."""
