"""One short file a transport, where one file is enough; the parts of the others stand beside them.

    name         files                                      ranks
    threads      threads.py  progress/mailbox.py            threads of one process; also "threads-unbuffered"
    plain-tcp    plain_tcp.py  progress/mailbox.py          processes; blocking TCP, to read
    tcp          tcp.py                                     processes, over TCP alone
    shm          shm/                                       processes of one host, over shared memory
    auto         auto.py                                    processes: shm inside a host, tcp between hosts
    mpi          mpi/                                       processes that mpirun started
    nccl         gpu/  auto.py for the host                 processes with GPUs: their arrays by NCCL, or, where ranks
                                                            share a GPU, by CUDA IPC (not yet measured on a GPU)

throttled.py makes any of them slow.

progress/ drives the links of tcp, shm and mpi. The path of a message: stream.py makes it a frame (frames.py,
message.py) and matches it with its receive; a link (link.py; its kinds are TcpLink, ShmLink, MpiLink) moves
its bytes; engine.py decides which thread does the work, and when it sleeps (poll_loop.py: on links that the kernel can
watch). full_mesh.py makes the connections.
"""
