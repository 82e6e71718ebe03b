"""What scripts/aot is made of: Triton kernels compiled for GPUs that are not here, and their machine code read.

`cases` names what is launched, `compiler` makes listings of it, `matrix` has that done for all, `facts` reads the listings,
`rules` and `baseline` judge, `report` tells. Not shipped.
"""
