"""Planners: each takes shapes and costs and returns decisions with the price of the runner-up."""
