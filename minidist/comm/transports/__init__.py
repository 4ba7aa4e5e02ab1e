"""One short file a transport; what those between processes share stands beside them.

    threads   mailbox.py                                ranks as threads; also "threads-unbuffered"
    sockets   auto.py     the two below, by which      ranks as processes: each link the best there is
                           ranks share a host           (shared_memory=False: transport.py alone)
              transport.py   link.py  stream.py  full_mesh.py  over TCP
    shm       transport.py       ring_buffer.py, and the same        ranks of one host, over shared memory
                           exchange_board.py                     and what all of them see there at once
    mpi       transport.py       link.py  stream.py           ranks that mpirun started
    nccl      nccl.py      auto.py for the host        ranks with GPUs: their arrays by NCCL, or,
                           staging.py  nccl_lane.py         where ranks share a GPU, by CUDA IPC
                           cuda_ipc.py                  (not yet measured on a GPU)

The path of a message: stream.py makes it a frame (frames.py, message.py) and matches it with the receive it belongs to
(peer.py); a link (link.py; its kinds are SocketLink, ShmLink, MpiLink) moves its bytes; engine.py decides which thread
does the work, and when it sleeps (polled.py: on links of which the kernel has news).
"""
