/* Rows of cold data are asked for before they are copied. The order is known, so the rows of all the next batches can
 * be in flight, where a page fault waits for one page at a time.
 *
 * Data is cold where reading it makes the thread wait for the disk: the kernel counts such faults for each thread, so
 * that a busy machine is not mistaken for a cold store. Before the first batch a byte of a few samples is read; later the
 * faults of copying are counted over batches of any size. While rows are asked for, a byte of one sample in some batches
 * is read before it is: when those make no fault either, the data is hot and asking is given up, each time after more
 * of them. Threads share an Ahead without a lock; what they miss of each other costs a request too many. */
#define _GNU_SOURCE /* madvise, RUSAGE_THREAD */
#include "ring.h"

#include <time.h>
#ifndef _WIN32
#include <sys/mman.h>
#include <sys/resource.h>
#endif

#define AHEAD_BATCHES 8
#define AHEAD_SAMPLES 4096
#define ASK_BYTES ((uintptr_t)128 << 10) /* the kernel reads no more of one request than its read-ahead, 128 KiB unless set */
#define FIRST_PROBES 8
#define PROBE_BATCHES 4
#define PROBE_SAMPLES 2048
#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELAXED)

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

void core_turn_cold(Ahead *ahead) {
    if (LOAD(ahead->is_cold)) return;
    int patience = LOAD(ahead->patience);
    STORE(ahead->patience, patience == 0 ? 8 : patience < 1 << 20 ? 2 * patience : patience);
    STORE(ahead->fast, 0);
    STORE(ahead->faults, 0);
    STORE(ahead->samples, 0);
    STORE(ahead->is_cold, 1);
}

void core_note_probe(Ahead *ahead, int waited) {
    int fast = waited ? 0 : LOAD(ahead->fast) + 1;
    STORE(ahead->fast, fast);
    if (fast > LOAD(ahead->patience)) STORE(ahead->is_cold, 0);
}

#ifdef MADV_WILLNEED
int64_t core_ask(const Column *column, int64_t start, int64_t stop) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (start < 0 || stop > column->num_rows || start >= stop) return 0; /* the copy will say so */
    int64_t bytes = (stop - start) * column->row_bytes;
    for (int64_t shard = core_shard_of(column, start); start < stop; shard++) {
        int64_t begin = column->starts[shard], end = column->starts[shard + 1], last = stop < end ? stop : end;
        if (last <= start) continue;
        const char *rows = core_shard(column, shard);
        if (rows != NULL) {
            uintptr_t from = (uintptr_t)(rows + (start - begin) * column->row_bytes) & ~(page - 1);
            uintptr_t to = (uintptr_t)(rows + (last - begin) * column->row_bytes);
            for (; from < to; from += ASK_BYTES)
                (void)madvise((void *)from, to - from < ASK_BYTES ? to - from : ASK_BYTES, MADV_WILLNEED);
        }
        start = last;
    }
    return bytes;
}
#else
int64_t core_ask(const Column *column, int64_t start, int64_t stop) { return (void)column, (void)start, (void)stop, 0; }
#endif

int core_touch(const Column *column, int64_t row) {
    if (row < 0 || row >= column->num_rows || column->row_bytes == 0) return 0;
    int64_t shard = core_shard_of(column, row), faults = core_disk_faults();
    const volatile char *rows = core_shard(column, shard);
    if (rows == NULL) return 0;
    (void)rows[(row - column->starts[shard]) * column->row_bytes];
    return core_disk_faults() > faults;
}

/* Rows of samples from `first` on, and their bytes; x and y of one column lie in one span. */
static int64_t ask_samples(const Program *program, int64_t first, const Work *work) {
    int64_t bytes = 0;
    for (int64_t i = first; i < work->last; i++) {
        const Gather *gather = program->gathers[work->parts[i]];
        for (int f = 0; f < gather->num_fields; f++) {
            int64_t start, stop;
            if (core_column_rows(program, work, i, f, &start, &stop)) bytes += core_ask(gather->fields[f].column, start, stop);
        }
    }
    return bytes;
}

static int waits_for_disk(const Program *program, const Work *work, int64_t i) {
    const Gather *gather = program->gathers[work->parts[i]];
    int waited = 0;
    for (int f = 0; f < gather->num_fields; f++) {
        int64_t start, stop;
        core_rows_of(program, &gather->fields[f], work, i, &start, &stop);
        if (start < stop) waited |= core_touch(gather->fields[f].column, start);
    }
    return waited;
}

/* The rows of a batch found, and their shards given; what is wrong with them is said when they are copied. */
static int found(const Program *program, int64_t batch, Work *work, PyThreadState **state) {
    Problem problem;
    if (core_find(program, batch, 0, program->size, work, &problem)) return 0;
    if (core_has_missing(program, work)) {
        PyEval_RestoreThread(*state);
        int status = core_give_missing(program, work);
        if (status && core_is_expected()) PyErr_Clear(); /* the copy will say so */
        else if (status) core_keep_error(&work->stop);
        *state = PyEval_SaveThread();
    }
    return work->stop == NULL;
}

void core_look_at_faults(Ahead *ahead, const Program *program, const Work *work, int64_t done, int64_t samples,
                         int64_t faults) {
    if (LOAD(ahead->is_cold)) return;
    faults = __atomic_add_fetch(&ahead->faults, faults, __ATOMIC_RELAXED);
    samples = __atomic_add_fetch(&ahead->samples, samples, __ATOMIC_RELAXED);
    if (faults >= 4 && faults * 64 > samples) {
        core_turn_cold(ahead);
        ask_samples(program, done, work); /* the rest of this batch */
    } else if (samples > PROBE_SAMPLES) {
        STORE(ahead->faults, 0);
        STORE(ahead->samples, 0);
    }
}

void core_request_ahead(const Program *program, int64_t batch, int64_t last, Work *work, PyThreadState **state) {
    Ahead *ahead = work->ahead;
    if (!LOAD(ahead->is_begun) && batch < last) { /* every thread that begins before this is known */
        int waited = 0;
        if (found(program, batch, work, state))
            for (int64_t i = 0; i < program->size && i < FIRST_PROBES && !waited; i++) waited = waits_for_disk(program, work, i);
        if (waited) core_turn_cold(ahead);
        STORE(ahead->is_begun, 1);
    }
    if (!LOAD(ahead->is_cold)) return;
    int64_t distance = AHEAD_SAMPLES / program->size + 1;
    if (distance < AHEAD_BATCHES) distance = AHEAD_BATCHES;
    int64_t every = PROBE_SAMPLES / program->size;
    if (every < PROBE_BATCHES) every = PROBE_BATCHES;
    if (core_fetch_of(program, work) != NULL) { /* which reads what it needs itself */
        if (batch % every == 0 && batch < last && found(program, batch, work, state))
            core_note_probe(ahead, waits_for_disk(program, work, 0));
        return;
    }
    if (last > batch + distance) last = batch + distance;
    for (;;) { /* each batch is asked for once, by whichever thread comes first */
        int64_t next = LOAD(ahead->asked), from = next > batch ? next : batch;
        if (from >= last || from - batch > 1 + AHEAD_BYTES / (LOAD(ahead->batch_bytes) + 1)) break;
        if (!__atomic_compare_exchange_n(&ahead->asked, &next, from + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        if (!found(program, from, work, state)) {
            if (work->stop != NULL) return;
            continue;
        }
        if (from % every == 0) core_note_probe(ahead, waits_for_disk(program, work, 0));
        STORE(ahead->batch_bytes, ask_samples(program, 0, work));
        STORE(ahead->done, from + 1);
    }
    /* At the start another thread may have taken this batch and not come to it yet. */
    if (LOAD(ahead->done) <= batch && found(program, batch, work, state)) ask_samples(program, 0, work);
}
