"""One rank of a run: mesh, model, executor, optimizer, data and checkpoints."""
