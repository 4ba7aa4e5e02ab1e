// Every load and store of a kernel: g++ -fsanitize=thread calls the functions at the end of this file before each.
//
// An access goes to an argument, to shared memory, to the thread's own stack or to a constant; anything else is out of
// bounds. Each byte of shared memory and each element of an argument remembers who last wrote it and who has read it
// since: a read of shared memory that nobody wrote, and two accesses of which one writes and that no barrier (or
// __syncwarp, within a warp) puts in order, end the launch.
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

namespace cuda_on_cpu {

extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
extern "C" const char _end __attribute__((visibility("hidden")));

struct Access {             // all zero: none
    bool happened, atomic, pending;         // pending: an asynchronous copy that has not arrived
    uint32_t block, thread, epoch, warp_epoch;
    const void* code;
};

struct Cell {               // a byte of shared memory, or an element of an argument
    Access write, read, read_by_another;
};

struct Region {
    Array array;
    bool shared;
    Cell* cells;            // calloc's pages are zero and cost nothing until touched
};

static std::vector<Region> regions;
static const char* constants_begin;
static const char* constants_end;

// ------------------------------------------------------------------------------------------------------- messages

static std::string element(const Region& region, const char* address) {
    const int64_t offset = address - region.array.begin, size = region.array.itemsize;
    const int64_t index = offset >= 0 ? offset / size : -((-offset + size - 1) / size);
    return std::string(region.array.name) + "[" + std::to_string(index) + "]";
}

static std::string nearest(const char* address) {
    const Region* best = nullptr;
    uint64_t distance = 0;
    for (const Region& r : regions) {
        const uint64_t away = address < r.array.begin ? r.array.begin - address : address - (r.array.begin + r.array.nbytes);
        if (!best || away < distance) best = &r, distance = away;
    }
    if (!best || distance > (64 << 20)) return "an address that belongs to no array";
    return element(*best, address) + " of " + std::to_string(best->array.nbytes / best->array.itemsize);
}

static std::string thread_of(const Access& a) {
    const uint32_t* n = run.launch->block;
    const uint32_t* g = run.launch->grid;
    return "block " + describe({a.block % g[0], a.block / g[0] % g[1], a.block / g[0] / g[1]}) + " thread "
        + describe({a.thread % n[0], a.thread / n[0] % n[1], a.thread / n[0] / n[1]});
}

// ---------------------------------------------------------------------------------------------------------- races

// Whether something orders the earlier access before the one of the running thread.
static bool ordered(const Access& earlier, const Access& now) {
    if (!earlier.happened) return true;
    if (earlier.block != now.block) return earlier.epoch < run.fenced[earlier.block];
    if (earlier.thread == now.thread || earlier.epoch < now.epoch) return true;
    return earlier.thread / 32 == now.thread / 32 && earlier.warp_epoch < now.warp_epoch;
}

static void check_race(const Access& earlier, const Access& now, bool wrote, bool writes, const Region& region,
                       const char* address) {
    if (ordered(earlier, now) || (earlier.atomic && now.atomic)) return;
    fail("race on " + element(region, address) + ": " + thread_of(earlier) + (wrote ? " wrote" : " read") + " it{other}, "
         + thread_of(now) + (writes ? " writes" : " reads") + " it{where}, and no barrier stands between",
         now.code, earlier.code);
}

static void visit(Cell& cell, const Access& now, bool writes, const Region& region, const char* address) {
    check_race(cell.write, now, true, writes, region, address);
    if (writes) {
        check_race(cell.read, now, false, true, region, address);
        check_race(cell.read_by_another, now, false, true, region, address);
        cell = {now, {}, {}};
    } else if (cell.read.thread == now.thread || ordered(cell.read, now)) {
        cell.read = now;
    } else {
        cell.read_by_another = now;
    }
}

// --------------------------------------------------------------------------------------------------- transactions

// The lanes of a warp run one after another here; on a GPU the same instruction of all lanes is one request. So a
// request is (block, warp, instruction, how often this lane came there), and costs the 32-byte sectors it touches.
using Place = std::tuple<uint32_t, uint32_t, const void*>;                  // block, thread or warp, code
static std::map<Place, uint32_t> visits;
static std::map<std::tuple<Place, uint32_t>, std::set<uint64_t>> requests[2];

static void count(const char* address, std::size_t nbytes, bool writes, const void* code) {
    const uint32_t thread = run.current->number, time = visits[{run.block_number, thread, code}]++;
    std::set<uint64_t>& sectors = requests[writes][{{run.block_number, thread / 32, code}, time}];
    const auto first = reinterpret_cast<uint64_t>(address) / 32, last = reinterpret_cast<uint64_t>(address + nbytes - 1) / 32;
    for (uint64_t sector = first; sector <= last; sector++) sectors.insert(sector);
    (writes ? run.report->stores : run.report->loads).bytes += nbytes;
}

static void sum_up(std::map<std::tuple<Place, uint32_t>, std::set<uint64_t>>& table, Traffic& traffic) {
    traffic.requests = table.size();
    for (const auto& entry : table) traffic.sectors += entry.second.size();
    table.clear();
}

// ----------------------------------------------------------------------------------------------------- every access

static bool within(const char* address, const char* begin, std::size_t nbytes) {
    return address >= begin && address < begin + nbytes;
}

static Region* region_of(const char* address) {
    static std::size_t last = 0;                            // most accesses go where the one before went
    if (last < regions.size() && within(address, regions[last].array.begin, regions[last].array.nbytes)) return &regions[last];
    for (last = 0; last < regions.size(); last++) {
        if (within(address, regions[last].array.begin, regions[last].array.nbytes)) return &regions[last];
    }
    return nullptr;
}

static void access(const void* pointer, std::size_t nbytes, bool writes, bool atomic, const void* code, bool counted = true) {
    if (!run.current || !nbytes) return;
    run.steps++;
    check_steps(code);
    const char* address = static_cast<const char*>(pointer);
    if (within(address, run.current->stack, stack_bytes)) return;
    const char* verb = writes ? " writes " : " reads ";
    Region* region = region_of(address);
    if (!region && !writes && address >= constants_begin && address + nbytes <= constants_end) return;
    if (!region || !within(address + nbytes - 1, region->array.begin, region->array.nbytes)) {
        fail("out of bounds: " + who() + verb + nearest(region ? address + nbytes - 1 : address) + "{where}", code);
    }
    if (nbytes <= 16 && !(nbytes & (nbytes - 1)) && reinterpret_cast<uint64_t>(address) % nbytes) {
        fail("misaligned: " + who() + verb + std::to_string(nbytes) + " bytes at " + element(*region, address)
             + "{where}, whose address is not a multiple of " + std::to_string(nbytes), code);
    }
    if (writes && !region->array.writable) fail(who() + " writes " + element(*region, address) + "{where}, a const array", code);
    const Access now{true, atomic, false, run.block_number, run.current->number, run.epoch, 
                     run.warp_epoch[run.current->number / 32], code};
    const std::size_t size = region->shared ? 1 : region->array.itemsize, offset = address - region->array.begin;
    for (std::size_t number = offset / size; number * size < offset + nbytes; number++) {
        Cell& cell = region->cells[number];
        if (region->shared && cell.write.block != now.block) cell = Cell{};         // of a block that is gone
        if (!writes && cell.write.pending) {
            fail("read of an asynchronous copy that nobody waited for: " + who() + " reads " + element(*region, address)
                 + "{where}, copied{other}", code, cell.write.code);
        }
        if (region->shared && !writes && !cell.write.happened) {
            fail("read of shared memory that nobody wrote: " + who() + " reads " + element(*region, address) + "{where}", code);
        }
        visit(cell, now, writes, *region, region->array.begin + number * size);
    }
    if (!run.launch->count || !counted) return;
    if (region->shared) (writes ? run.report->stores : run.report->loads).shared += nbytes;
    else count(address, nbytes, writes, code);
}

static void set_pending(const char* address, int nbytes, bool pending) {
    Region& region = *region_of(address);
    const std::size_t size = region.shared ? 1 : region.array.itemsize;
    for (int i = 0; i < nbytes; i += size) region.cells[(address - region.array.begin + i) / size].write.pending = pending;
}

void atomic_access(void* address, int nbytes, void* caller) {
    pause();                                                // so that who waits in a loop for another lets it run
    access(address, nbytes, true, true, caller);
}

void range_access(const void* address, int nbytes, bool write, void* caller) {
    access(address, nbytes, write, false, caller, false);
}

void async_copy(void* to, const void* from, int nbytes, void* caller) {
    access(from, nbytes, false, false, caller);
    access(to, nbytes, true, false, caller);
    memset(to, 0xA5, nbytes);                               // when it arrives nobody knows
    set_pending(static_cast<char*>(to), nbytes, true);
    Thread& me = *run.current;
    me.copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), nbytes, me.group, caller});
}

void async_commit() { run.current->group++; }

void async_wait(int groups) {
    std::vector<Copy>& copies = run.current->copies;
    while (!copies.empty() && copies.front().group + groups < run.current->group) {
        const Copy copy = copies.front();
        copies.erase(copies.begin());
        memcpy(copy.to, copy.from, copy.nbytes);
        set_pending(copy.to, copy.nbytes, false);
        access(copy.to, copy.nbytes, true, false, copy.code);
    }
}

static void add_region(const Array& array, bool shared) {
    if (!array.nbytes) return;
    const std::size_t count = shared ? array.nbytes : array.nbytes / array.itemsize;
    regions.push_back({array, shared, static_cast<Cell*>(calloc(count, sizeof(Cell)))});
}

void memory_begins() {
    constants_begin = &__ehdr_start, constants_end = &_end;
    for (uint64_t i = 0; i < run.launch->arrays_count; i++) add_region(run.launch->arrays[i], false);
    for (uint64_t i = 0; i < run.launch->shared_count; i++) add_region(run.launch->shared[i], true);
    add_region({run.dynamic_shared.data(), run.dynamic_shared.size(), 4, "dynamic shared memory", 1}, true);
}

// Shared memory of a new block is rubbish.
void memory_begins_block() {
    for (Region& r : regions) {
        if (r.shared) memset(r.array.begin, 0xA5, r.array.nbytes);
    }
}

void memory_ends() {
    sum_up(requests[0], run.report->loads);
    sum_up(requests[1], run.report->stores);
    for (Region& r : regions) free(r.cells);
    regions.clear(), visits.clear();
}

}  // namespace cuda_on_cpu

// ---------------------------------------------------------------------------- what the compiler's instrumentation calls

#define CALLED(name, nbytes, writes)                                                        \
    extern "C" void __tsan_##name(void* address) {                                          \
        cuda_on_cpu::access(address, nbytes, writes, false, __builtin_return_address(0));   \
    }
CALLED(read1, 1, false)
CALLED(read2, 2, false)
CALLED(read4, 4, false)
CALLED(read8, 8, false)
CALLED(read16, 16, false)
CALLED(write1, 1, true)
CALLED(write2, 2, true)
CALLED(write4, 4, true)
CALLED(write8, 8, true)
CALLED(write16, 16, true)
CALLED(unaligned_read2, 2, false)
CALLED(unaligned_read4, 4, false)
CALLED(unaligned_read8, 8, false)
CALLED(unaligned_read16, 16, false)
CALLED(unaligned_write2, 2, true)
CALLED(unaligned_write4, 4, true)
CALLED(unaligned_write8, 8, true)
CALLED(unaligned_write16, 16, true)
extern "C" void __tsan_read_range(void* address, unsigned long nbytes) {
    cuda_on_cpu::access(address, nbytes, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, unsigned long nbytes) {
    cuda_on_cpu::access(address, nbytes, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit(void*) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
