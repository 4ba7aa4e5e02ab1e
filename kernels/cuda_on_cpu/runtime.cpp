// Threads of a block as fibres, and the places where they wait for each other: barriers and warps.
#include "runtime.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

namespace cuda_on_cpu {

Run run;
static jmp_buf scheduler;
static std::vector<Thread*> ready;
static std::mt19937_64 random_numbers;
static void (*kernel_call)(void**);
extern "C" const Kernel cuda_kernels[];         // the end of the source, written by on_cpu.py
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

// ------------------------------------------------------------------------------------------------------- messages

std::string describe(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string who() { return "block " + describe(run.block) + " thread " + describe(run.current->index); }

static void note(const std::string& what, const void* where, const void* other) {
    const auto offset = [](const void* code) {   // of the call, not of what follows it
        return code ? static_cast<uint64_t>(static_cast<const char*>(code) - &__ehdr_start) - 1 : 0;
    };
    snprintf(run.report->error, sizeof run.report->error, "%s", what.c_str());
    run.report->where = offset(where);
    run.report->other = offset(other);
}

static std::string place(const char* file, int line) { return std::string(file) + ":" + std::to_string(line); }

void fail(const std::string& what, const void* where, const void* other) {
    note(what, where, other);
    _longjmp(scheduler, 1);
}

void refuse(const char* what, const char* file, int line) { fail(who() + ": " + what + " at " + place(file, line)); }

// -------------------------------------------------------------------------------------------------------- fibres

// swapcontext keeps the mask of signals by a system call at each switch, which took a third of all time; _setjmp and
// _longjmp make none. Only a fibre's first turn needs setcontext, and a fibre then runs its thread of block after block.

static void body() {
    for (;;) {
        kernel_call(run.launch->args);
        run.current->state = State::ended;
        if (!_setjmp(run.current->place)) _longjmp(scheduler, 1);
    }
}

static void begin(Thread& thread) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {thread.stack, 0, stack_bytes};
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    thread.begun = true;
    setcontext(&context);
}

static void take_turn(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (!thread.begun) begin(thread);
    _longjmp(thread.place, 1);
}

static void end_turn(Thread& me) {
    if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

static void yield_as(State state, const char* file, int line) {
    Thread& me = *run.current;
    me.state = state, me.file = file, me.line = line;
    end_turn(me);
}

static void wake(Thread& thread) {
    thread.state = State::ready;
    ready.push_back(&thread);
}

void pause() {
    wake(*run.current);
    end_turn(*run.current);
}

void check_steps(const void* where) {
    if (run.steps <= run.launch->most_steps) return;
    fail("no end: " + who() + " is{where} after " + std::to_string(run.launch->most_steps)
         + " steps; does it wait in a loop for what nobody does? Else take smaller arrays", where);
}

static void prepare(Thread& thread) {
    thread.copies.clear();
    wake(thread);
}

uint3 thread_index() { return run.current->index; }
uint3 block_index() { return run.block; }
uint3 block_size() { return {run.launch->block[0], run.launch->block[1], run.launch->block[2]}; }
uint3 grid_size() { return {run.launch->grid[0], run.launch->grid[1], run.launch->grid[2]}; }
char* dynamic_shared() { return run.dynamic_shared.data(); }

// ------------------------------------------------------------------------------------------------------- barriers

int barrier(int vote, const char* file, int line) {
    run.current->vote = vote != 0;
    yield_as(State::at_barrier, file, line);
    return run.vote_result;
}

static bool same_place(const Thread& a, const Thread& b) { return a.line == b.line && !strcmp(a.file, b.file); }

// Every thread of the block waits at one __syncthreads: let them go on.
static bool pass_barrier() {
    const Thread& first = run.threads[0];
    for (const Thread& t : run.threads) {
        if (t.state != State::at_barrier || !same_place(t, first)) return false;
    }
    run.vote_result = 0;
    run.epoch++, run.report->barriers++;
    for (Thread& t : run.threads) {
        run.vote_result += t.vote;
        wake(t);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------- warps

// The lanes of `mask` meet at one line; afterwards `all` of each points to what every lane brought.
static void meet(unsigned mask, const void* value, int nbytes, const char* file, int line) {
    Thread& me = *run.current;
    const unsigned first = me.number / 32 * 32, lanes = std::min<std::size_t>(32, run.threads.size() - first);
    if (!(mask >> (me.number - first) & 1)) refuse("a lane calls a warp's function whose mask does not name it", file, line);
    if (lanes < 32 && mask >> lanes) {
        refuse("a mask names lanes that this last warp of the block does not have; make the block a multiple of 32",
               file, line);
    }
    me.mask = mask, me.nbytes = nbytes;
    memcpy(me.value, value, nbytes);
    me.file = file, me.line = line, me.state = State::in_warp;
    for (unsigned lane = 0; lane < lanes; lane++) {
        const Thread& t = run.threads[first + lane];
        if (!(mask >> lane & 1)) continue;
        if (t.state != State::in_warp || t.mask != mask || t.nbytes != nbytes || !same_place(t, me)) {
            end_turn(me);                               // not all are here: the last to come wakes this one
            return;
        }
    }
    std::vector<char>& met = run.meetings.emplace_back(32 * nbytes);
    for (unsigned lane = 0; lane < lanes; lane++) {
        Thread& t = run.threads[first + lane];
        if (!(mask >> lane & 1)) continue;
        memcpy(&met[lane * nbytes], t.value, nbytes);
        t.all = met.data();
        if (&t != &me) wake(t);
    }
    me.state = State::ready;
}

void from_lane(unsigned mask, void* value, int nbytes, int source, const char* file, int line) {
    meet(mask, value, nbytes, file, line);
    if (!(mask >> source & 1)) refuse("a shuffle reads a lane that its mask does not name", file, line);
    memcpy(value, run.current->all + source * nbytes, nbytes);
}

void from_all_lanes(unsigned mask, const void* value, int nbytes, void* all, const char* file, int line) {
    meet(mask, value, nbytes, file, line);
    memcpy(all, run.current->all, 32 * nbytes);
}

unsigned ballot(unsigned mask, bool vote, const char* file, int line) {
    meet(mask, &vote, sizeof vote, file, line);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (mask >> lane & 1 && run.current->all[lane] ? 1u : 0u) << lane;
    return bits;
}

void sync_warp(unsigned mask, const char* file, int line) {
    const uint32_t warp = run.current->number / 32, before = run.warp_epoch[warp];
    meet(mask, &before, sizeof before, file, line);
    if (run.warp_epoch[warp] == before) run.warp_epoch[warp]++;      // the first to go on
}

void fence() { run.fenced[run.block_number] = run.epoch + 1; }

// --------------------------------------------------------------------------------------------------------- a launch

// Nobody can go on: say who waits where.
static void stuck() {
    std::string text;
    std::vector<std::string> seen;
    for (const Thread& t : run.threads) {
        const std::string what = t.state == State::ended ? "ended" : std::string("wait at ")
            + (t.state == State::at_barrier ? "__syncthreads " : "a warp's function ") + place(t.file, t.line);
        if (std::find(seen.begin(), seen.end(), what) != seen.end()) continue;
        seen.push_back(what);
        const auto number = std::count_if(run.threads.begin(), run.threads.end(), [&](const Thread& other) {
            return other.state == t.state && (t.state == State::ended || same_place(other, t));
        });
        text += (text.empty() ? "" : "; ") + std::to_string(number) + " (thread " + describe(t.index) + " first) " + what;
    }
    note("divergent barrier in block " + describe(run.block) + ": of " + std::to_string(run.threads.size())
         + " threads " + text + "; all must come to the same one", nullptr, nullptr);
}

static void run_block() {
    ready.clear();
    run.meetings.clear();
    run.epoch++;
    for (Thread& t : run.threads) prepare(t);
    memory_begins_block();
    std::size_t ended = 0;
    while (!run.report->error[0]) {
        if (ready.empty() && (ended == run.threads.size() || !pass_barrier())) break;
        std::swap(ready[random_numbers() % ready.size()], ready.back());
        run.current = ready.back();
        ready.pop_back();
        run.steps += 16;
        take_turn(*run.current);
        ended += run.current->state == State::ended;
        run.current = nullptr;
        // A lane reads what it met for as soon as it runs again, so nothing is read after the next barrier.
        if (ready.empty() && ended < run.threads.size()) run.meetings.clear();
    }
    if (!run.report->error[0] && ended < run.threads.size()) stuck();
}

static char* stacks(std::size_t count) {
    static char* memory = static_cast<char*>(mmap(nullptr, 1024 * stack_bytes, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return memory == MAP_FAILED || count > 1024 ? nullptr : memory;
}

static void set_up(const Launch* launch, Report* report) {
    const uint32_t* n = launch->block;
    run = Run{};
    run.launch = launch, run.report = report;
    run.threads.resize(static_cast<std::size_t>(n[0]) * n[1] * n[2]);
    run.warp_epoch.resize((run.threads.size() + 31) / 32);
    run.fenced.resize(static_cast<std::size_t>(launch->grid[0]) * launch->grid[1] * launch->grid[2]);
    run.dynamic_shared.resize(launch->dynamic_shared);
    random_numbers.seed(launch->seed);
    char* memory = stacks(run.threads.size());
    if (!memory) return note("no memory for the stacks of 1024 threads", nullptr, nullptr);
    for (uint32_t i = 0; i < run.threads.size(); i++) {
        run.threads[i].stack = memory + i * stack_bytes;
        run.threads[i].number = i;
        run.threads[i].index = {i % n[0], i / n[0] % n[1], i / n[0] / n[1]};
    }
}

extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_launch(const Launch* launch, Report* report) {
    memset(report, 0, sizeof *report);
    set_up(launch, report);
    kernel_call = nullptr;
    for (const Kernel* k = cuda_kernels; k->name; k++) {
        if (!strcmp(k->name, launch->kernel)) kernel_call = k->call;
    }
    if (!kernel_call) note("no such kernel", nullptr, nullptr);
    memory_begins();
    std::vector<uint32_t> order(run.fenced.size());
    for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_numbers);
    const uint32_t* n = launch->grid;
    for (const uint32_t i : order) {
        if (report->error[0]) break;
        run.block_number = i;
        run.block = {i % n[0], i / n[0] % n[1], i / n[0] / n[1]};
        run_block();
    }
    run.current = nullptr;
    memory_ends();
}

}  // namespace cuda_on_cpu
