"""Triton counterparts of the operators that move memory or that share the device with communication.

One module per family; in each, the kernels, the `torch.library` operators that launch them (with a fake
implementation, so that they work under torch.compile and CUDA graphs), and the same in plain PyTorch, named
``reference_...``. Importing a module imports Triton; nothing outside this folder does, unless
``train.kernels`` asks for it. No operator is differentiable: gradients are operators of their own, as
`braid.kernels.operators.operator` wants them.

Training (``train.kernels``) uses what `operators` puts in the place of PyTorch's: norms, residual additions,
activations, rotary embedding, linear maps and the statistics of cross-entropy. Nothing in training calls the
others yet: dropout, the last linear map with its cross-entropy, router, permutation and grouped products of
experts, and of linear maps what leaves multiprocessors free or signals finished chunks. Tests and the
benchmark of kernels do.

Results do not depend on how many multiprocessors there are: no sum is formed by atomic additions.

Triton's interpreter (environment ``TRITON_INTERPRET=1``, read when Triton is imported) runs them on the CPU.
"""
