/* The shards of a batch: which rows its fields read, and those shards of them that Python still has to give. */
#include "core.h"

void core_rows_of(const Program *self, const Field *field, const Work *work, int64_t i, int64_t *first, int64_t *last) {
    int64_t at = field->axis * self->size + i, start = work->starts[at], stop = work->stops[at];
    if (field->kind == RECORD) {
        start = work->records[i];
        stop = start < field->column->num_rows ? start + 1 : start;
    }
    *first = *last = 0;
    if (READS_NOTHING(field->kind) || (field->kind == RAGGED && stop <= field->first)) return;
    if (start < 0 || stop < start || stop > field->column->num_rows) return;
    int64_t skip = field->kind == DENSE ? field->first : 0;
    if (skip >= stop - start) return;
    start += skip;
    if ((field->kind == DENSE || field->kind == PADDED) && field->length < stop - start) stop = start + field->length;
    *first = start;
    *last = stop;
}

int core_column_rows(const Program *self, const Work *work, int64_t i, int f, int64_t *first, int64_t *last) {
    const Gather *gather = self->gathers[work->parts[i]];
    const Column *column = gather->fields[f].column;
    for (int g = 0; g < f; g++)
        if (gather->fields[g].column == column) return 0;
    *first = INT64_MAX;
    *last = 0;
    for (int g = f; g < gather->num_fields; g++) {
        int64_t start, stop;
        if (gather->fields[g].column != column) continue;
        core_rows_of(self, &gather->fields[g], work, i, &start, &stop);
        if (start < stop && start < *first) *first = start;
        if (stop > *last) *last = stop;
    }
    return *first < *last;
}

/* The first shard at or after *shard of rows [start, stop) that is not there, or -1. */
static int64_t next_missing(const Column *column, int64_t shard, int64_t stop) {
    for (; shard < column->num_shards && column->starts[shard] < stop; shard++)
        if (column->starts[shard] < column->starts[shard + 1] && core_shard(column, shard) == NULL) return shard;
    return -1;
}

int core_has_missing(const Program *self, const Work *work) {
    for (int64_t i = work->first; i < work->last; i++) {
        const Gather *gather = self->gathers[work->parts[i]];
        for (int f = 0; f < gather->num_fields; f++) {
            int64_t start, stop;
            core_rows_of(self, &gather->fields[f], work, i, &start, &stop);
            const Column *column = gather->fields[f].column;
            if (start < stop && next_missing(column, core_shard_of(column, start), stop) >= 0) return 1;
        }
    }
    return 0;
}

int core_give_missing(const Program *self, const Work *work) {
    for (int64_t i = work->first; i < work->last; i++) {
        const Gather *gather = self->gathers[work->parts[i]];
        for (int f = 0; f < gather->num_fields; f++) {
            const Field *field = &gather->fields[f];
            int64_t start, stop, shard;
            core_rows_of(self, field, work, i, &start, &stop);
            if (start >= stop) continue;
            for (shard = core_shard_of(field->column, start); (shard = next_missing(field->column, shard, stop)) >= 0; shard++) {
                PyObject *done = PyObject_CallFunction(self->find_shard, "iiL", (int)work->parts[i], field->number, (long long)shard);
                Py_XDECREF(done);
                if (done == NULL) return -1;
                if (core_shard(field->column, shard) == NULL)
                    return core_raise_problem(&(Problem){MISSING, field, shard, 0, 0}), -1;
            }
        }
    }
    return 0;
}
