// What runtime.cpp (threads, barriers, warps) and memory.cpp (loads and stores) know of each other and of Python.
#pragma once
#include <setjmp.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

// ---- shared with on_cpu.py, field by field -----------------------------------------------------------------------

struct Array {              // an argument, or one __shared__ variable
    char* begin;
    uint64_t nbytes;
    uint64_t itemsize;
    const char* name;
    int64_t writable;
};

struct Launch {
    const char* kernel;
    uint32_t grid[3], block[3];
    uint64_t dynamic_shared;            // bytes
    void** args;
    const Array* arrays;                // global memory
    uint64_t arrays_count;
    const Array* shared;                // the __shared__ variables of every kernel of the library
    uint64_t shared_count;
    uint64_t seed;
    int64_t count;                      // whether to count transactions
    uint64_t most_steps;                // a launch that takes more is ended: a step is an access; 16, a thread that waits
};

struct Traffic {                        // of global memory
    uint64_t bytes, requests, sectors;  // what threads asked for; warps' instructions; 32-byte sectors these touched
    uint64_t shared;                    // bytes of shared memory
};

struct Report {
    char error[1024];                   // empty: all went well
    uint64_t where, other;              // addresses within the library, for addr2line; 0: not known
    Traffic loads, stores;
    uint64_t barriers;                  // that blocks passed
};

// ---- threads -----------------------------------------------------------------------------------------------------

enum class State { ready, at_barrier, in_warp, ended };

struct Copy {                           // asynchronous: issued and not arrived
    char* to;
    const char* from;
    int nbytes;
    uint32_t group;
    const void* code;
};

struct Thread {
    jmp_buf place;                      // where it goes on at its next turn, once begun
    bool begun;
    char* stack;
    uint3 index;
    uint32_t number;                    // within the block
    State state;
    const char* file;                   // where it waits
    int line;
    bool vote;
    unsigned mask;
    char value[128];
    int nbytes;
    const char* all;                    // the values of all 32 lanes, once they have met
    std::vector<Copy> copies;
    uint32_t group;                     // of asynchronous copies: the open one
};

constexpr std::size_t stack_bytes = 128 << 10;

struct Run {
    const Launch* launch;
    Report* report;
    std::vector<Thread> threads;
    Thread* current;                    // null: the scheduler runs
    uint3 block;
    uint32_t block_number;
    uint64_t steps;
    uint32_t epoch;                     // +1 at each barrier; never the same in two blocks
    std::vector<uint32_t> warp_epoch;   // +1 at each __syncwarp
    std::vector<uint32_t> fenced;       // by block: the epoch of its last __threadfence + 1
    std::vector<char> dynamic_shared;
    std::vector<std::vector<char>> meetings;    // by warp: what lanes brought, kept until all have read it
    int vote_result;
};

extern Run run;

// End the launch with this message; the calling thread is never resumed. Addresses: of code, for the line.
[[noreturn]] void fail(const std::string& what, const void* where = nullptr, const void* other = nullptr);
std::string describe(uint3 index);
std::string who();                      // "block (0, 0, 0) thread (1, 0, 0)"

void pause();                           // let other threads of the block run
void check_steps(const void* where);

void memory_begins();                   // a launch
void memory_begins_block();
void memory_ends();

}  // namespace cuda_on_cpu
