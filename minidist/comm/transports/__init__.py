"""The transports: one short file each where one file is enough, else a folder.

    name         files                                      ranks
    threads      threads.py  progress/mailbox.py            threads of one process; also
                                                            "threads-unbuffered"
    plain-tcp    plain_tcp.py  progress/mailbox.py          processes; blocking TCP, for reading
    tcp          tcp.py  auto.py connects                   processes, over TCP only
    shm          shm/  auto.py connects                     processes of one host, over shared
                                                            memory
    auto         auto.py                                    processes: shm inside a host, tcp
                                                            between hosts
    mpi          mpi/                                       processes that mpirun started
    nccl         gpu/  auto.py for the host                 processes with GPUs: arrays over NCCL,
                                                            or, where ranks share a GPU, CUDA IPC
                                                            (several GPUs: not yet run)

throttled.py slows any of them down. progress/ drives the links of tcp, shm and mpi: stream.py turns
messages into frames and matches them with receives; a TcpLink, ShmLink or MpiLink moves the bytes;
engine.py decides in which thread.
"""
