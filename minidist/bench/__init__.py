"""`minidist bench`: collectives, kernels and training steps timed beside other libraries.

command, arguments      the command and its options
jobs                    contenders as processes that take turns
collectives, floors     all-reduce and three verbs more, beside gloo and MPI
overlap, overlap_step   communication hidden by computation
compress/               time to a loss by compression scheme and bandwidth, and when not to compress
calibrate               cost of messages, for the profile of `auto`
step/                   a training step beside PyTorch's
kernels/                each CUDA kernel beside PyTorch's
tables, plots           of all but compress/, step/ and kernels/, which have their own
overlap_plots           a step as recorded
"""
