"""`minidist bench`: collectives, kernels and training steps timed beside other libraries."""
