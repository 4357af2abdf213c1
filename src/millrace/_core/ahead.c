/* Rows of cold data are asked for before they are copied. The order is known, so the rows of all the next batches can
 * be in flight, where a page fault waits for one page at a time.
 *
 * Data is cold where copying it makes the thread wait for the disk: the kernel counts such faults for each thread, so
 * that a busy machine is not mistaken for a cold store. While rows are asked for, one sample in four batches is not:
 * when those make no fault either, the data is hot and asking is given up, each time after more of them. */
#define _GNU_SOURCE /* madvise, RUSAGE_THREAD */
#include "ring.h"

#include <time.h>
#ifndef _WIN32
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#define AHEAD_BATCHES 8
#define AHEAD_SAMPLES 1024
#define PROBE_BATCHES 4

int64_t core_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t core_disk_faults(void) {
#ifdef RUSAGE_THREAD
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_majflt;
#endif
    return 0;
}

#ifdef MADV_WILLNEED
static void ask(const Column *column, int64_t start, int64_t stop) {
    static uintptr_t page = 0;
    if (!page) page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (start < 0 || stop > column->num_rows || start >= stop) return; /* the copy will say so */
    for (int64_t shard = core_shard_of(column, start); start < stop; shard++) {
        int64_t begin = column->starts[shard], end = column->starts[shard + 1], last = stop < end ? stop : end;
        if (last <= start) continue;
        const char *rows = core_shard(column, shard);
        if (rows != NULL) {
            uintptr_t from = (uintptr_t)(rows + (start - begin) * column->row_bytes) & ~(page - 1);
            uintptr_t to = (uintptr_t)(rows + (last - begin) * column->row_bytes);
            (void)madvise((void *)from, to - from, MADV_WILLNEED);
        }
        start = last;
    }
}

static void ask_samples(const Program *program, int64_t first, const Work *work) {
    for (int64_t i = first; i < program->size; i++) {
        const Gather *gather = program->gathers[work->parts[i]];
        for (int f = 0; f < gather->num_fields; f++) {
            const Field *field = &gather->fields[f];
            int is_known = 0; /* x and y of one column lie in one span */
            for (int g = 0; g < f; g++) is_known |= gather->fields[g].column == field->column;
            if (is_known) continue;
            int64_t at = field->axis * program->size + i;
            if (field->kind == RECORD) ask(field->column, work->records[i], work->records[i] + 1);
            else ask(field->column, work->starts[at], work->stops[at]);
        }
    }
}

void core_look_at_faults(Ahead *ahead, const Program *program, int64_t done, int64_t faults, const Work *work) {
    if (ahead->is_cold || faults * 64 <= program->size) return;
    ahead->patience = ahead->patience ? (ahead->patience < 1 << 20 ? 2 * ahead->patience : ahead->patience) : 8;
    ahead->fast = 0;
    ahead->is_cold = 1;
    ask_samples(program, done, work); /* the rest of this batch */
}

void core_request_ahead(Ahead *ahead, const Program *program, int64_t batch, int64_t last, Work *work) {
    if (!__atomic_load_n(&ahead->is_cold, __ATOMIC_RELAXED)) return;
    int64_t distance = AHEAD_SAMPLES / program->size + 1;
    if (distance < AHEAD_BATCHES) distance = AHEAD_BATCHES;
    if (last > batch + distance) last = batch + distance;
    for (;;) { /* each batch is asked for once, by whichever thread comes first */
        int64_t next = __atomic_load_n(&ahead->asked, __ATOMIC_RELAXED), from = next > batch ? next : batch;
        if (from >= last) return;
        Problem problem;
        if (!__atomic_compare_exchange_n(&ahead->asked, &next, from + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        if (!core_find(program, from, work, &problem)) ask_samples(program, from % PROBE_BATCHES == 0, work);
    }
}
#else
void core_look_at_faults(Ahead *ahead, const Program *program, int64_t done, int64_t faults, const Work *work) {
    (void)ahead, (void)program, (void)done, (void)faults, (void)work;
}

void core_request_ahead(Ahead *ahead, const Program *program, int64_t batch, int64_t last, Work *work) {
    (void)ahead, (void)program, (void)batch, (void)last, (void)work;
}
#endif

void core_note_probe(Ahead *ahead, int64_t batch, int64_t faults) {
    if (!ahead->is_cold || batch % PROBE_BATCHES) return;
    ahead->fast = faults ? 0 : ahead->fast + 1;
    if (ahead->fast > ahead->patience) ahead->is_cold = 0;
}
