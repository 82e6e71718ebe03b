"""Kernels in Triton, for NVIDIA and AMD. The modules import triton, which a plain installation lacks: only their users do so."""
