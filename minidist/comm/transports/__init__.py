"""One short file a transport, where one file is enough; the parts of the others stand beside them.

    name         files                                      ranks
    threads      threads.py  progress/mailbox.py            threads of one process; also
                                                            "threads-unbuffered"
    plain-tcp    plain_tcp.py  progress/mailbox.py          processes; blocking TCP, to read
    tcp          tcp.py  auto.py connects                   processes, over TCP alone
    shm          shm/  auto.py connects                     processes of one host, over shared
                                                            memory
    auto         auto.py                                    processes: shm inside a host, tcp
                                                            between hosts
    mpi          mpi/                                       processes that mpirun started
    nccl         gpu/  auto.py for the host                 processes with GPUs: their arrays by
                                                            NCCL, or, where ranks share a GPU, by
                                                            CUDA IPC (several GPUs: not yet run)

throttled.py makes any of them slow. progress/ drives the links of tcp, shm and mpi: stream.py makes
a message a frame, and matches it with its receive; a TcpLink, ShmLink or MpiLink moves its bytes;
engine.py decides in which thread.
"""
