"""Fault drills: a run is broken in every way there is, and has to come out as if nothing had been."""
