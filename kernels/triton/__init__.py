"""Triton counterparts of operators that move memory: where an H100 showed them to be quicker than PyTorch's.

One module per family; in each, the kernels, the `torch.library` operators that launch them (with a fake
implementation, so that they work under torch.compile and CUDA graphs). Importing a module imports Triton;
nothing outside this folder does, unless ``train.kernels`` asks for it. No operator is differentiable:
gradients are operators of their own, as `braid.kernels.operators.operator` wants them. Training
(``train.kernels``) uses what `operators` puts in the place of PyTorch's.

Results do not depend on how many multiprocessors there are: no sum is formed by atomic additions.

Triton's interpreter (environment ``TRITON_INTERPRET=1``, read when Triton is imported) runs them on the CPU.
"""
