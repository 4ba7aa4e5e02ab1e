"""`minidist bench`: times of collectives, kernels and training steps, compared with other
libraries.

command, arguments      the command and its options
jobs                    contenders as processes that take turns
collectives, floors     all-reduce and three more verbs, compared with gloo and MPI
overlap, overlap_step   communication hidden by computation
compress/               time to a loss by compression scheme and bandwidth, and when not to compress
calibrate               cost of messages, for the profile of `auto`
step/                   a training step, compared with PyTorch's
kernels/                each CUDA kernel, compared with PyTorch's
tables, plots           for all except compress/, step/ and kernels/, which have their own
overlap_plots           the picture of a recorded step
"""
