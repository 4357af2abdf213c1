/* Copying rows: the span of a sample, over shards and pieces, widened on the way, into its place in a batch.
 *
 * Every span is checked against the rows there are and every write against the room it has, so that a view that
 * is wrong is an error and never a crash. Twin of gather/reference.py, byte for byte. */
#include "core.h"

static float widened_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits = (rest << 13) + (112u << 23);
    float small = (float)rest * 0x1p-24f; /* subnormal halves are normal floats; no flush to zero can touch them */
    uint32_t small_bits;
    memcpy(&small_bits, &small, 4);
    bits = rest >= 0x7c00 ? bits + (112u << 23) : bits;
    bits = (rest < 0x400 ? small_bits : bits) | sign;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static float widened_bits(uint16_t stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* By memcpy: mapped numbers may lie at any address. Compilers make vector code of it. */
#define WIDEN(STORED, WIDE, VALUE)                                          \
    for (int64_t i = 0; i < count; i++) {                                     \
        STORED v;                                                             \
        memcpy(&v, from + i * (int64_t)sizeof v, sizeof v);                   \
        WIDE w = VALUE;                                                       \
        memcpy(to + i * (int64_t)sizeof w, &w, sizeof w);                     \
    }                                                                         \
    break;

static void widen(int cast, const char *restrict from, int64_t count, char *restrict to, int64_t item_bytes) {
    switch (cast) {
    case FROM_I8: WIDEN(int8_t, int64_t, v)
    case FROM_U8: WIDEN(uint8_t, int64_t, v)
    case FROM_I16: WIDEN(int16_t, int64_t, v)
    case FROM_U16: WIDEN(uint16_t, int64_t, v)
    case FROM_I32: WIDEN(int32_t, int64_t, v)
    case FROM_U32: WIDEN(uint32_t, int64_t, v)
    case FROM_F16: WIDEN(uint16_t, float, widened_half(v))
    case FROM_BF16: WIDEN(uint16_t, float, widened_bits(v))
    default: memcpy(to, from, (size_t)(count * item_bytes));
    }
}

/* One number of each group of items, as a target among features is. */
#define PICK(TYPE)                                                                       \
    for (int64_t g = 0; g < groups; g++, from += stride, to += sizeof(TYPE)) memcpy(to, from, sizeof(TYPE));

static void copy_rows(const Field *field, const char *from, int64_t rows, char *to) {
    if (field->items == NULL) {
        widen(field->cast, from, rows * field->row_items, to, field->item_bytes);
        return;
    }
    int64_t groups = rows * field->num_groups, stride = field->group * field->item_bytes;
    if (field->is_run && field->cast == COPY && field->num_items == 1 && (field->item_bytes == 4 || field->item_bytes == 8)) {
        from += field->items[0] * field->item_bytes;
        if (field->item_bytes == 4) PICK(uint32_t) else PICK(uint64_t)
        return;
    }
    for (int64_t g = 0; g < groups; g++, from += stride) {
        if (field->is_run) {
            widen(field->cast, from + field->items[0] * field->item_bytes, field->num_items, to, field->item_bytes);
            to += field->num_items * field->out_item_bytes;
            continue;
        }
        for (int64_t k = 0; k < field->num_items; k++, to += field->out_item_bytes)
            widen(field->cast, from + field->items[k] * field->item_bytes, 1, to, field->item_bytes);
    }
}

static int failed(Problem *problem, int code, const Field *field, int64_t a, int64_t b, int64_t c) {
    problem->code = code;
    problem->field = field;
    problem->a = a;
    problem->b = b;
    problem->c = c;
    return code;
}

/* Rows of one shard where they were fetched, else NULL. */
static const char *fetched_rows(const Fetched *fetched, const Column *column, int64_t start, int64_t stop) {
    for (int k = 0; fetched != NULL && k < fetched->count; k++) {
        const FetchedPart *part = &fetched->parts[k];
        if (part->column == column && part->start <= start && stop <= part->stop)
            return part->rows + (start - part->start) * column->row_bytes;
    }
    return NULL;
}

/* Rows [start, stop) of a column, over the ends of shards. */
static int copy_span(const Field *field, int64_t start, int64_t stop, char *to, const Fetched *fetched, Problem *problem) {
    const Column *column = field->column;
    if (start < 0 || stop < start || stop > column->num_rows)
        return failed(problem, OUTSIDE, field, start, stop, column->num_rows);
    if (start == stop) return FINE;
    for (int64_t shard = core_shard_of(column, start); start < stop; shard++) {
        int64_t begin = column->starts[shard], end = column->starts[shard + 1];
        int64_t last = stop < end ? stop : end;
        if (last <= start) continue; /* an empty shard */
        const char *rows = fetched_rows(fetched, column, start, last);
        if (rows == NULL) {
            if ((rows = core_shard(column, shard)) == NULL) return failed(problem, MISSING, field, shard, 0, 0);
            rows += (start - begin) * column->row_bytes;
        }
        copy_rows(field, rows, last - start, to);
        to += (last - start) * field->out_row_bytes;
        start = last;
    }
    return FINE;
}

/* Up to `room` rows of the pieces of sample i, without the first `skip`; *copied says how many. */
static int copy_pieces(const Field *field, const Pieces *pieces, int64_t i, int64_t skip, int64_t room, char *to,
                       int64_t *copied, const Fetched *fetched, Problem *problem) {
    int64_t low = pieces->offsets == NULL ? i : pieces->offsets[i];
    int64_t high = pieces->offsets == NULL ? i + 1 : pieces->offsets[i + 1];
    *copied = 0;
    for (int64_t p = low; p < high && *copied < room; p++) {
        int64_t start = pieces->starts[p], stop = pieces->stops[p];
        if (start < 0 || stop < start || stop > field->column->num_rows)
            return failed(problem, OUTSIDE, field, start, stop, field->column->num_rows);
        if (skip >= stop - start) {
            skip -= stop - start;
            continue;
        }
        start += skip;
        skip = 0;
        if (stop - start > room - *copied) stop = start + (room - *copied);
        if (copy_span(field, start, stop, to + *copied * field->out_row_bytes, fetched, problem)) return problem->code;
        *copied += stop - start;
    }
    return FINE;
}

int64_t core_out_bytes(const Field *field, int64_t samples, int64_t rows) {
    int64_t bytes;
    if (__builtin_mul_overflow(samples, rows, &bytes) || __builtin_mul_overflow(bytes, field->out_row_bytes, &bytes)) return -1;
    return bytes;
}

int64_t core_piece_rows(const Pieces *pieces, int64_t i) {
    int64_t low = pieces->offsets == NULL ? i : pieces->offsets[i];
    int64_t high = pieces->offsets == NULL ? i + 1 : pieces->offsets[i + 1];
    uint64_t rows = 0; /* pieces that are wrong may overflow here; they are found when they are copied */
    for (int64_t p = low; p < high; p++) rows += (uint64_t)pieces->stops[p] - (uint64_t)pieces->starts[p];
    return (int64_t)rows;
}

/* The rows of sample i's pieces, at most `most`. */
static int count_rows(const Field *field, const Pieces *pieces, int64_t i, int64_t most, int64_t *rows, Problem *problem) {
    int64_t low = pieces->offsets == NULL ? i : pieces->offsets[i];
    int64_t high = pieces->offsets == NULL ? i + 1 : pieces->offsets[i + 1];
    *rows = 0;
    for (int64_t p = low; p < high && *rows < most; p++) {
        int64_t start = pieces->starts[p], stop = pieces->stops[p];
        if (start < 0 || stop < start || stop > field->column->num_rows)
            return failed(problem, OUTSIDE, field, start, stop, field->column->num_rows);
        *rows += stop - start < most - *rows ? stop - start : most - *rows;
    }
    return FINE;
}

/* What stands behind the rows: zeros, or the field's own number. What is there is doubled: few long copies. */
static void fill_up(const Field *field, char *to, int64_t bytes) {
    if (bytes <= 0 || !field->fill_bytes) {
        if (bytes > 0) memset(to, 0, (size_t)bytes);
        return;
    }
    memcpy(to, field->fill, (size_t)field->fill_bytes);
    for (int64_t there = field->fill_bytes; there < bytes; there += there < bytes - there ? there : bytes - there)
        memcpy(to + there, to, (size_t)(there < bytes - there ? there : bytes - there));
}

int core_gather(const Field *field, const Pieces *axes, const int64_t *records, int64_t i, int64_t room, char *to,
                const Fetched *fetched, Problem *problem) {
    if (field->kind == RECORD)
        return copy_span(field, records[i], (int64_t)((uint64_t)records[i] + 1), to, fetched, problem);
    int64_t copied, skip = field->kind == DENSE ? field->first : 0;
    if (READS_NOTHING(field->kind)) {
        const Pieces *pieces = &axes[field->axis];
        int64_t most = field->kind == LENGTHS ? field->first : field->kind == MASK ? field->length : INT64_MAX;
        if (count_rows(field, pieces, i, most, &copied, problem)) return problem->code;
        if (field->kind == START) {
            int64_t piece = pieces->offsets == NULL ? i : pieces->offsets[i], start = 0;
            if (pieces->offsets == NULL || piece < pieces->offsets[i + 1]) start = pieces->starts[piece];
            start = (int64_t)((uint64_t)start + (uint64_t)field->first);
            memcpy(to, &start, sizeof start);
        } else if (field->kind == LENGTHS) memcpy(to, &copied, sizeof copied);
        else {
            memset(to, 1, (size_t)copied);
            memset(to + copied, 0, (size_t)(most - copied));
        }
        return FINE;
    }
    if (copy_pieces(field, &axes[field->axis], i, skip, room, to, &copied, fetched, problem)) return problem->code;
    if (field->kind == PADDED)
        fill_up(field, to + copied * field->out_row_bytes, (room - copied) * field->out_row_bytes);
    else if (copied < room)
        return failed(problem, SHORT, field, i, copied, room);
    return FINE;
}

PyObject *core_raise_problem(const Problem *problem) {
    long long a = problem->a, b = problem->b, c = problem->c;
    const char *name = problem->field != NULL ? problem->field->name : "";
    switch (problem->code) {
    case OUTSIDE:
        return core_raise("ConfigError", "a sample covers rows [%lld, %lld) for %s, whose column has %lld; its view is wrong",
                          a, b, name, c);
    case SHORT:
        return core_raise("ConfigError", "sample %lld has %lld rows for %s, which needs %lld; its view is wrong", a, b,
                          name, c);
    case BEYOND:
        return core_raise("ConfigError", "sample %lld is beyond the %lld of its view, in a plan of it", a, b);
    case PASSED: return core_raise("ConfigError", "batch %lld passes position 2^63 - 1, where every line ends", a);
    case TOO_LARGE:
        return core_raise("ConfigError", "a batch holds more rows of %s than memory can; lower batch, or its view is wrong", name);
    default: return core_raise("FeedError", "shard %lld for %s was not given", a, name);
    }
}
