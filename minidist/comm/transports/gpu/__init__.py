"""Arrays on GPUs: NCCL, CUDA IPC, and staging through the host."""
