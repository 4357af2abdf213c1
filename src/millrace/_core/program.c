/* Program: a view and an order as plain steps, run for a whole batch without Python.
 *
 * position -> sample (order.c) -> its leaf view and spans (the steps here) -> copied into a slot (gather.c). */
#include "ring.h"

#include <stdlib.h>

#define FETCH_SAMPLES 64 /* smaller batches do not keep a disk busy; their rows are asked for many batches ahead */
#define PREFETCH_BYTES 8192 /* of a sample and a column; the processor goes on by itself */
#define PREFETCH_AHEAD 4096 /* at least so many bytes ahead of the copy, and one sample */
#define LOOK_BYTES (256 << 10) /* copied between looks at the faults they made: each takes a quarter of a microsecond */

PyTypeObject *Program_Type;

static int beyond(Problem *problem, int64_t x, int64_t limit) { return (*problem = (Problem){BEYOND, NULL, x, limit, 0}).code; }

static int64_t first_beyond(const int64_t *ends, int64_t count, int64_t x) {
    int64_t low = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (ends[low + half] <= x) low += half + 1, count -= half + 1;
        else count = half;
    }
    return low;
}

/* The number of the bit that is the x-th set one of a bitmap, -1 where its ranks are wrong. Twin of view/bitmap.py. */
static int64_t selected(const Step *step, int64_t x) {
    int64_t block = first_beyond(step->numbers[1] + 1, step->rows, x);
    if (block >= step->rows) return -1;
    uint64_t rest = (uint64_t)x - (uint64_t)step->numbers[1][block];
    for (int64_t w = block * BLOCK_WORDS; w < (block + 1) * BLOCK_WORDS; w++) {
        uint64_t word = (uint64_t)step->numbers[0][w], ones = (uint64_t)__builtin_popcountll(word);
        if (rest < ones) {
            for (; rest; rest--) word &= word - 1;
            return w * 64 + __builtin_ctzll(word);
        }
        rest -= ones;
    }
    return -1;
}

/* Window x of records that lie in several shards: which record it is of, and its first row. -1 where the ranks or the offsets
 * are wrong. Twin of view/windows.py. */
static int64_t ranked(const Step *step, int64_t x, int64_t *start) {
    int64_t records = step->own[0][step->num_pieces], blocks = records / RANK_RECORDS + (records % RANK_RECORDS > 0);
    int64_t block = first_beyond(step->numbers[1] + 1, blocks, x);
    if (block >= blocks) return -1;
    x = (int64_t)((uint64_t)x - (uint64_t)step->numbers[1][block]);
    int64_t record = block * RANK_RECORDS, end = record + RANK_RECORDS < records ? record + RANK_RECORDS : records;
    int64_t piece = first_beyond(step->own[0] + 1, step->num_pieces, record);
    for (; x >= 0 && record < end; record++) {
        while (record >= step->own[0][piece + 1]) piece++; /* ends: record is below the last piece's end */
        const int64_t *offsets = step->pieces[piece] + (record - step->own[0][piece]);
        int64_t spare = (int64_t)((uint64_t)offsets[1] - (uint64_t)offsets[0] - (uint64_t)step->rows);
        int64_t windows = spare < 0 ? 0 : (int64_t)((uint64_t)(step->stride == 1 ? spare : spare / step->stride) + 1);
        if (x < windows) {
            *start = (int64_t)((uint64_t)step->numbers[0][piece] + (uint64_t)offsets[0] + (uint64_t)x * (uint64_t)step->stride);
            return record;
        }
        x = (int64_t)((uint64_t)x - (uint64_t)windows);
    }
    return -1;
}

/* Finds sample x: its part, and its span on every axis, written to place i of the work area. */
static int locate(const Program *self, int64_t x, int64_t i, Work *work, Problem *problem) {
    const Step *step = self->steps;
    int64_t record = 0, start;
    for (;;) {
        int64_t limit = step->kind == CONCAT || step->kind == LOCATE ? (step->count ? step->numbers[0][step->count - 1] : 0)
                                                                     : step->count;
        if (x < 0 || x >= limit) return beyond(problem, x, limit);
        if (step->kind == TAKE) {
            x = step->numbers[0][x];
            step = &self->steps[step->next];
        } else if (step->kind == SELECT) {
            x = selected(step, x);
            step = &self->steps[step->next];
        } else if (step->kind == CONCAT) {
            int64_t k = first_beyond(step->numbers[0], step->count, x);
            if (k == step->count) return beyond(problem, x, limit);
            x = (int64_t)((uint64_t)x - (uint64_t)(k ? step->numbers[0][k - 1] : 0));
            step = &self->steps[step->numbers[1][k]];
        } else break;
    }
    work->parts[i] = step->part;
    if (step->kind == OFFSETS) {
        for (int k = 0; k < step->num_axes; k++) {
            work->starts[k * self->size + i] = step->numbers[k][x];
            work->stops[k * self->size + i] = step->numbers[k][x + 1];
        }
        work->records[i] = x;
        return FINE;
    }
    if (step->kind == PIECES) {
        int64_t piece = first_beyond(step->own[0] + 1, step->num_pieces, x), inside = x - step->own[0][piece];
        for (int k = 0; k < step->num_axes; k++) {
            const int64_t *offsets = step->pieces[k * step->num_pieces + piece] + inside;
            work->starts[k * self->size + i] = (int64_t)((uint64_t)offsets[0] + (uint64_t)step->numbers[k][piece]);
            work->stops[k * self->size + i] = (int64_t)((uint64_t)offsets[1] + (uint64_t)step->numbers[k][piece]);
        }
        work->records[i] = x;
        return FINE;
    }
    if (step->kind == STRIDE) start = (int64_t)((uint64_t)x * (uint64_t)step->stride);
    else if (step->kind == RANKED) {
        if ((record = ranked(step, x, &start)) < 0) return beyond(problem, x, step->count);
    } else {
        record = first_beyond(step->numbers[0], step->count, x);
        if (record >= step->count) return beyond(problem, x, record); /* someone wrote into the array */
        x = (int64_t)((uint64_t)x - (uint64_t)(record ? step->numbers[0][record - 1] : 0));
        start = (int64_t)((uint64_t)step->numbers[1][record] + (uint64_t)x * (uint64_t)step->stride);
    }
    work->starts[i] = start;
    work->stops[i] = (int64_t)((uint64_t)start + (uint64_t)step->rows);
    work->records[i] = record;
    return FINE;
}

/* Of a batch, or of a group of them. */
int core_find(const Program *self, int64_t batch, int64_t first, int64_t last, Work *work, Problem *problem) {
    if (work->batch == batch && work->first <= first && last <= work->last) return FINE;
    int64_t each = self->size / self->group;
    work->batch = -1;
    for (int64_t i = first; i < last; i++) {
        int64_t begin = self->start + (batch * self->group + i / each) * self->batch, position = begin + self->begin + i % each;
        work->valid[i] = self->stop < 0 || position < self->stop;
        /* Padding repeats the first sample of the global batch; a batch behind the last one is made for nobody. */
        if (self->stop >= 0 && begin >= self->stop) begin = self->stop - 1;
        work->positions[i] = work->valid[i] ? position : begin;
    }
    core_order(&self->order, work->positions + first, last - first, work->samples + first);
    for (int64_t i = first; i < last; i++)
        if (locate(self, work->samples[i], i, work, problem)) return problem->code;
    work->batch = batch;
    work->first = first;
    work->last = last;
    return FINE;
}

Work *core_work_new(Program *self, int may_fetch) {
    size_t size = (size_t)self->size, axes = (size_t)self->num_axes;
    Work *work = malloc(sizeof *work + size * (8 * (3 + 2 * axes) + 4 + 1) + 64);
    if (work == NULL) return NULL;
    *work = (Work){.batch = -1, .ahead = &self->ahead, .may_fetch = may_fetch};
    work->positions = (int64_t *)(work + 1);
    work->samples = work->positions + size;
    work->records = work->samples + size;
    work->starts = work->records + size;
    work->stops = work->starts + size * axes;
    work->parts = (int32_t *)(work->stops + size * axes);
    work->valid = (char *)(work->parts + size);
    return work;
}

void core_work_free(Work *work) {
    if (work == NULL) return;
    core_fetch_free(work->fetch);
    Py_XDECREF(work->stop);
    free(work);
}

Fetch *core_fetch_of(const Program *self, Work *work) {
    int when = __atomic_load_n(&self->fetches, __ATOMIC_ACQUIRE);
    int is_cold = self->size >= FETCH_SAMPLES && __atomic_load_n(&work->ahead->is_cold, __ATOMIC_RELAXED);
    if (!work->may_fetch || when == NEVER || (when == COLD && !is_cold)) return NULL;
    if (work->fetch == NULL) work->may_fetch = (work->fetch = core_fetch_new()) != NULL;
    return work->fetch;
}

static void pieces_of(const Program *self, const Work *work, Pieces *axes) {
    for (int k = 0; k < self->num_axes; k++)
        axes[k] = (Pieces){work->starts + k * self->size, work->stops + k * self->size, NULL};
}

static int has_ragged(const Program *self) {
    for (int f = 0; f < self->num_fields; f++)
        if (self->gathers[0]->fields[f].kind == RAGGED) return 1;
    return 0;
}

/* Where the samples of every ragged field begin, and where its values lie. */
static int measure_ragged(const Program *self, const Work *work, char *memory, int64_t capacity, Measure *measure,
                          Problem *problem) {
    for (int f = 0; f < self->num_fields; f++) {
        if (self->gathers[0]->fields[f].kind != RAGGED) continue;
        int64_t rows = 0, *offsets = capacity < self->fixed_bytes ? NULL : (int64_t *)(memory + self->places[f]);
        for (int64_t i = 0; i <= self->size; i++) {
            if (offsets != NULL) offsets[i] = rows;
            if (i == self->size) break;
            const Field *field = &self->gathers[work->parts[i]]->fields[f];
            int64_t at = field->axis * self->size + i, start = work->starts[at], stop = work->stops[at];
            if (start < 0 || stop < start || stop > field->column->num_rows)
                return (*problem = (Problem){OUTSIDE, field, start, stop, field->column->num_rows}).code;
            if (stop > field->first && __builtin_add_overflow(rows, stop - start, &rows)) rows = INT64_MAX;
        }
        const Field *first = &self->gathers[0]->fields[f];
        int64_t bytes = core_out_bytes(first, 1, rows), *used = &measure->used;
        measure->values_at[f] = *used;
        if (bytes < 0 || bytes > INT64_MAX - ALIGN || __builtin_add_overflow(*used, (bytes + ALIGN - 1) / ALIGN * ALIGN, used))
            return (*problem = (Problem){TOO_LARGE, first, 0, 0, 0}).code;
    }
    return FINE;
}

int core_measure(const Program *self, int64_t batch, char *memory, int64_t capacity, Measure *measure, Work *work,
                 Problem *problem) {
    problem->code = FINE;
    measure->used = self->fixed_bytes;
    if (has_ragged(self)) {
        if (core_find(self, batch, 0, self->size, work, problem)) return problem->code;
        if (measure_ragged(self, work, memory, capacity, measure, problem)) return problem->code;
    }
    if (measure->used > capacity) *problem = (Problem){SPACE, NULL, measure->used, 0, 0};
    return problem->code;
}

/* Has the processor fetch the rows of a sample while those before it are copied: rows of a shuffled line lie anywhere, and
 * a copy waits for the first lines of each page. One core copies W1 by a fifth faster so, and W2 by two thirds. */
static void prefetch(const Program *self, const Work *work, int64_t i) {
    const Gather *gather = self->gathers[work->parts[i]];
    const Column *before = NULL;
    for (int64_t f = 0, start, stop, done = 0; f < self->num_fields; f++, done = stop) {
        const Column *column = gather->fields[f].column;
        core_rows_of(self, &gather->fields[f], work, i, &start, &stop);
        if (column == before && start < done) start = done; /* x and y of one column overlap */
        before = column;
        if (start >= stop) continue;
        int64_t shard = core_shard_of(column, start), end = column->starts[shard + 1];
        const char *rows = core_shard(column, shard);
        if (rows == NULL) continue;
        rows += (start - column->starts[shard]) * column->row_bytes;
        int64_t bytes = ((stop < end ? stop : end) - start) * column->row_bytes;
        for (int64_t at = 0; at < bytes && at < PREFETCH_BYTES; at += 64) __builtin_prefetch(rows + at);
    }
}

/* Copies samples [first, last) to their places. */
static int copy_samples(const Program *self, int64_t first, int64_t last, char *memory, const Measure *measure, Work *work,
                        Fetch *fetch, Problem *problem) {
    Pieces axes[MAX_AXES];
    Fetched fetched = {.count = 0};
    pieces_of(self, work, axes);
    int64_t each = measure->used / self->size + 1, turn = LOOK_BYTES / each + 1, ahead = PREFETCH_AHEAD / each + 1;
    int64_t faults = core_disk_faults(), looked = first;
    for (int64_t i = first; i < last; i++) {
        const Gather *gather = self->gathers[work->parts[i]];
        if (fetch == NULL && i + ahead < last) prefetch(self, work, i + ahead);
        if (fetch != NULL && core_fetch(fetch, self, work, i, &fetched)) {
            work->may_fetch = fetched.count = 0; /* never again */
            core_fetch_end(fetch);
            fetch = NULL;
        }
        work->num_fetched += fetched.count > 0;
        for (int f = 0; f < self->num_fields; f++) {
            const Field *field = &gather->fields[f];
            int64_t room = field->kind == RECORD ? 1 : field->kind == RAGGED ? 0 : field->length;
            char *to = memory + self->places[f] + i * room * field->out_row_bytes;
            if (field->kind == RAGGED) {
                const int64_t *offsets = (const int64_t *)(memory + self->places[f]);
                room = offsets[i + 1] - offsets[i];
                to = memory + measure->values_at[f] + offsets[i] * field->out_row_bytes;
            }
            if (core_gather(field, axes, work->records, i, room, to, &fetched, problem)) return problem->code;
        }
        if (i + 1 - looked < turn && i + 1 < last) continue;
        int64_t now = core_disk_faults();
        core_look_at_faults(work->ahead, self, work, i + 1, i + 1 - looked, now - faults);
        faults = now;
        looked = i + 1;
    }
    return FINE;
}

int core_make(const Program *self, int64_t batch, int64_t first, int64_t last, char *memory, const Measure *measure,
              Work *work, Problem *problem) {
    problem->code = FINE;
    if (core_find(self, batch, first, last, work, problem)) return problem->code;
    Fetch *fetch = first == 0 && last == self->size ? core_fetch_of(self, work) : NULL;
    if (fetch != NULL) core_fetch_begin(fetch);
    copy_samples(self, first, last, memory, measure, work, fetch, problem);
    if (fetch != NULL) core_fetch_end(fetch);
    if (problem->code) return problem->code;
    int64_t *positions = (int64_t *)(memory + self->marks[0]), *samples = (int64_t *)(memory + self->marks[1]);
    for (int64_t i = first; i < last; i++) {
        positions[i] = work->valid[i] ? work->positions[i] : -1;
        samples[i] = work->valid[i] ? work->samples[i] : -1;
    }
    memcpy(memory + self->marks[2] + first, work->valid + first, (size_t)(last - first));
    return FINE;
}
