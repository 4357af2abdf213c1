/* Rows of cold columns that memory could not hold: read by io_uring past the page cache, into memory of the thread that makes
 * a batch, and copied from there.
 *
 * A thread keeps the reads of its next samples under way, and starts and awaits many with one call. A sample of 4.6 kB takes 5 us
 * of a core, where asking for its pages and copying them from a map takes 11. Where the kernel has no io_uring, or forbids it, and for
 * rows whose file has no descriptor, the map serves. */
#define _GNU_SOURCE /* syscall */
#include "ring.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <errno.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define READS 256u               /* under way at most */
#define AWAITED 32u              /* at a time: the disk keeps the rest */
#define SAMPLE_BYTES (512 << 10) /* that are read of one sample; the kernel's read-ahead serves larger ones well */
#define MEMORY_BYTES (8 << 20)
#define PAGE 4096

#define MOST_FAILED 64

enum { RUNNING, DONE, FAILED };

typedef struct {
    const Column *column;
    int64_t sample, start, stop, end; /* rows; end: of its memory, counted without going round */
    char *rows;
    int32_t needed; /* bytes up to the last row */
    int state;
} Read;

struct Fetch {
    int ring;
    void *rings, *entries;
    size_t rings_bytes, entries_bytes;
    unsigned *tail, mask, *array, *done_head, *done_tail, done_mask;
    struct io_uring_sqe *queue;
    struct io_uring_cqe *done;
    char *memory;
    Read reads[READS];     /* number k at k % READS */
    uint64_t first, next;  /* reads from `first` on are not copied yet; `next` is the number of the next */
    int64_t begun, copied; /* bytes of memory given to reads, and given back, counted without going round */
    int64_t sample;        /* the next to be read */
    unsigned num_queued, num_running;
    int num_failed; /* since the last that did not */
};

void core_fetch_free(Fetch *self) {
    if (self == NULL) return;
    if (self->rings != NULL) munmap(self->rings, self->rings_bytes);
    if (self->entries != NULL) munmap(self->entries, self->entries_bytes);
    if (self->ring >= 0) close(self->ring);
    if (self->memory != NULL) munmap(self->memory, MEMORY_BYTES);
    free(self);
}

static void *mapped(int fd, size_t bytes, long place) {
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, place);
    return found == MAP_FAILED ? NULL : found;
}

Fetch *core_fetch_new(void) {
    Fetch *self = calloc(1, sizeof *self);
    if (self == NULL) return NULL;
    struct io_uring_params made = {0};
    self->ring = (int)syscall(SYS_io_uring_setup, READS, &made);
    if (self->ring < 0 || !(made.features & IORING_FEAT_SINGLE_MMAP) || !(made.features & IORING_FEAT_NODROP)) goto fail;
    size_t queue = made.sq_off.array + made.sq_entries * sizeof(unsigned);
    size_t done = made.cq_off.cqes + made.cq_entries * sizeof(struct io_uring_cqe);
    self->rings_bytes = queue > done ? queue : done;
    self->entries_bytes = made.sq_entries * sizeof(struct io_uring_sqe);
    self->rings = mapped(self->ring, self->rings_bytes, IORING_OFF_SQ_RING);
    self->entries = mapped(self->ring, self->entries_bytes, IORING_OFF_SQES);
    self->memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (self->memory == MAP_FAILED) self->memory = NULL;
    if (self->rings == NULL || self->entries == NULL || self->memory == NULL) goto fail;
    /* What the disk writes to must not become a copy of a forked child's. */
    if (madvise(self->memory, MEMORY_BYTES, MADV_DONTFORK)) goto fail;
    char *rings = self->rings;
    self->tail = (unsigned *)(rings + made.sq_off.tail);
    self->mask = *(unsigned *)(rings + made.sq_off.ring_mask);
    self->array = (unsigned *)(rings + made.sq_off.array);
    self->done_head = (unsigned *)(rings + made.cq_off.head);
    self->done_tail = (unsigned *)(rings + made.cq_off.tail);
    self->done_mask = *(unsigned *)(rings + made.cq_off.ring_mask);
    self->done = (struct io_uring_cqe *)(rings + made.cq_off.cqes);
    self->queue = self->entries;
    return self;
fail:
    core_fetch_free(self);
    return NULL;
}

/* Rows [start, stop) of one shard: queued, unless that shard has no descriptor. */
static int queue_read(Fetch *self, const Column *column, int64_t shard, int64_t start, int64_t stop) {
    int fd = core_file(column, shard);
    if (fd < 0) return 0;
    int64_t from = (start - column->starts[shard]) * column->row_bytes, bytes = (stop - start) * column->row_bytes;
    int64_t skip = from % PAGE, length = (skip + bytes + PAGE - 1) / PAGE * PAGE; /* whole blocks, into whole pages */
    int64_t place = self->begun % MEMORY_BYTES;
    if (place + length > MEMORY_BYTES) self->begun += MEMORY_BYTES - place, place = 0;
    self->begun += length;
    char *memory = self->memory + place;
    self->reads[self->next % READS] =
        (Read){column, self->sample, start, stop, self->begun, memory + skip, (int32_t)(skip + bytes), RUNNING};
    unsigned at = *self->tail & self->mask;
    self->queue[at] = (struct io_uring_sqe){.opcode = IORING_OP_READ, .fd = fd, .off = (uint64_t)(from - skip),
                                            .addr = (uintptr_t)memory, .len = (uint32_t)length, .user_data = self->next};
    self->array[at] = at;
    __atomic_store_n(self->tail, *self->tail + 1, __ATOMIC_RELEASE);
    self->next++;
    self->num_queued++;
    return 1;
}

/* The reads of sample `self->sample`; what cannot be read is asked for, and copied from the map. */
static void queue_sample(Fetch *self, const Program *program, const Work *work) {
    uint64_t last = self->next + FETCHED_PARTS;
    int64_t left = SAMPLE_BYTES;
    const Gather *gather = program->gathers[work->parts[self->sample]];
    for (int f = 0; f < gather->num_fields; f++) {
        const Column *column = gather->fields[f].column;
        int64_t start, stop;
        if (!core_column_rows(program, work, self->sample, f, &start, &stop)) continue;
        for (int64_t shard = core_shard_of(column, start); start < stop; shard++) {
            int64_t end = column->starts[shard + 1] < stop ? column->starts[shard + 1] : stop;
            if (end <= start) continue; /* an empty shard */
            int64_t bytes = (end - start) * column->row_bytes;
            int is_small = self->next < last && bytes <= left;
            if (is_small && queue_read(self, column, shard, start, end)) left -= bytes;
            else core_ask(column, start, end);
            start = end;
        }
    }
    self->sample++;
}

/* Starts what is queued and waits for `count` reads to end; -1 where the kernel will not go on. */
static int enter(Fetch *self, unsigned count) {
    for (;;) {
        long given = syscall(SYS_io_uring_enter, self->ring, self->num_queued, count, IORING_ENTER_GETEVENTS, NULL, 0);
        int problem = given < 0 ? errno : 0;
        if (given > 0) self->num_queued -= (unsigned)given, self->num_running += (unsigned)given;
        unsigned head = *self->done_head, tail = __atomic_load_n(self->done_tail, __ATOMIC_ACQUIRE);
        for (; head != tail; head++, self->num_running--, count -= count > 0) {
            const struct io_uring_cqe *entry = &self->done[head & self->done_mask];
            Read *read = &self->reads[entry->user_data % READS];
            read->state = entry->res >= read->needed ? DONE : FAILED;
            self->num_failed = read->state == DONE ? 0 : self->num_failed + 1;
        }
        __atomic_store_n(self->done_head, head, __ATOMIC_RELEASE);
        if (problem && problem != EINTR && problem != EAGAIN && problem != EBUSY) return -1;
        if (self->num_queued == 0 && (count == 0 || self->num_running == 0)) return 0;
        if (count > self->num_running + self->num_queued) count = self->num_running + self->num_queued;
        if (problem == EAGAIN || problem == EBUSY) sched_yield();
    }
}

void core_fetch_begin(Fetch *self) {
    self->first = self->next;
    self->copied = self->begun;
    self->sample = 0;
}

int core_fetch(Fetch *self, const Program *program, const Work *work, int64_t i, Fetched *found) {
    if (self->num_failed >= MOST_FAILED) return -1; /* a filesystem that cannot do it after all */
    for (; self->first < self->next && self->reads[self->first % READS].sample < i; self->first++)
        self->copied = self->reads[self->first % READS].end;
    if (self->sample <= i || READS - (self->next - self->first) >= READS / 4) {
        /* Twice the room of a sample: going round may leave as much unused. */
        while (self->sample < program->size && READS - (self->next - self->first) > FETCHED_PARTS &&
               MEMORY_BYTES - (self->begun - self->copied) >= 4 * SAMPLE_BYTES)
            queue_sample(self, program, work);
        if (self->num_queued && enter(self, 0)) return -1;
    }
    found->count = 0;
    for (uint64_t k = self->first; k < self->next && self->reads[k % READS].sample == i; k++) {
        Read *read = &self->reads[k % READS];
        while (read->state == RUNNING)
            if (enter(self, self->num_running < AWAITED ? self->num_running : AWAITED)) return -1;
        if (read->state == DONE) found->parts[found->count++] = (FetchedPart){read->column, read->start, read->stop, read->rows};
    }
    return 0;
}

void core_fetch_end(Fetch *self) {
    while (self->num_running || self->num_queued)
        if (enter(self, self->num_running) && self->num_running == 0) break;
}
#else
Fetch *core_fetch_new(void) { return NULL; }
void core_fetch_free(Fetch *self) { (void)self; }
void core_fetch_begin(Fetch *self) { (void)self; }
int core_fetch(Fetch *self, const Program *program, const Work *work, int64_t i, Fetched *found) {
    return (void)self, (void)program, (void)work, (void)i, (void)found, -1;
}
void core_fetch_end(Fetch *self) { (void)self; }
#endif
