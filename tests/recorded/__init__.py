"""Records of what a commit does, and their comparison with those of another: tools, not tests.

``training`` records the bits of trained runs, ``simulated`` the numbers of simulated steps. Both go through
the command line, so that they outlast what is behind it.
"""
