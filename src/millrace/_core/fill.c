/* Gather.fill: samples whose spans Python knows, copied by several threads, and asked for ahead where they are cold. */
#include "ring.h"

/* What one call of fill works on, shared by its threads. */
typedef struct {
    const Gather *gather;
    Pieces axes[MAX_AXES];
    const int64_t *records, **places; /* where each sample of a ragged field begins */
    char **outs;
    int64_t first, last, next, turn, sample_bytes; /* turn: samples a thread takes at a time */
    Problem problem;
    int num_running;
    PyThread_type_lock lock, done;
} Task;

static int64_t room_of(const Task *task, int f, int64_t i, char **to) {
    const Field *field = &task->gather->fields[f];
    int64_t place = i - task->first, room = field->kind == RECORD ? 1 : field->length;
    if (field->kind == RAGGED) {
        *to = task->outs[f] + task->places[f][place] * field->out_row_bytes;
        return task->places[f][place + 1] - task->places[f][place];
    }
    *to = task->outs[f] + place * room * field->out_row_bytes;
    return room;
}

#define TURN_BYTES (128 << 10) /* that a thread takes at a time */
#define MOST_TURN 64
#define MOST_THREADS 64
#define MOST_AHEAD 1024 /* samples that are asked for ahead */

/* Samples [from, to) of all fields. */
static void ask_samples(const Task *task, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
        for (int f = 0; f < task->gather->num_fields; f++) {
            const Field *field = &task->gather->fields[f];
            if (READS_NOTHING(field->kind)) continue;
            if (field->kind == RECORD) {
                if (task->records[i] < field->column->num_rows) core_ask(field->column, task->records[i], task->records[i] + 1);
                continue;
            }
            const Pieces *pieces = &task->axes[field->axis];
            int64_t low = pieces->offsets == NULL ? i : pieces->offsets[i], high = pieces->offsets == NULL ? i + 1 : pieces->offsets[i + 1];
            int64_t most = field->kind == RAGGED ? INT64_MAX : field->first + field->length; /* padding cuts */
            for (int64_t p = low; p < high && most > 0; p++) {
                int64_t start = pieces->starts[p], stop = pieces->stops[p];
                if (start < 0 || stop <= start) continue;
                if (stop - start > most) stop = start + most;
                most -= stop - start;
                core_ask(field->column, start, stop);
            }
        }
}

static int waits_for_disk(const Task *task, int64_t i) {
    int waited = 0;
    for (int f = 0; f < task->gather->num_fields; f++) {
        const Field *field = &task->gather->fields[f];
        if (READS_NOTHING(field->kind)) continue;
        const Pieces *pieces = field->kind == RECORD ? NULL : &task->axes[field->axis];
        int64_t p = pieces == NULL || pieces->offsets == NULL ? i : pieces->offsets[i];
        if (pieces != NULL && pieces->offsets != NULL && p == pieces->offsets[i + 1]) continue;
        waited |= core_touch(field->column, pieces == NULL ? task->records[i] : pieces->starts[p]);
    }
    return waited;
}

/* Where the data is cold, asks for the samples of this call and the next of its `total`; up to which those were asked for. */
static int64_t request_ahead(const Task *task, Ahead *ahead, int64_t asked, int64_t total) {
    int64_t from = asked > task->first ? asked : task->first, more = AHEAD_BYTES / task->sample_bytes + 1;
    if (more > MOST_AHEAD) more = MOST_AHEAD;
    int64_t to = total - task->last < more ? total : task->last + more;
    int is_cold = __atomic_load_n(&ahead->is_cold, __ATOMIC_RELAXED);
    if (from >= to) return asked;
    if (is_cold) core_note_probe(ahead, waits_for_disk(task, from));
    for (int64_t i = task->first; i < task->last && i < task->first + 4 && !is_cold; i++)
        if ((is_cold = waits_for_disk(task, i))) core_turn_cold(ahead);
    if (!is_cold) return asked;
    ask_samples(task, from, to);
    return to;
}

static void work(void *argument) {
    Task *task = argument;
    int64_t low = 0, high = 0;
    Problem problem = {0};
    for (;;) {
        PyThread_acquire_lock(task->lock, WAIT_LOCK);
        if (problem.code && !task->problem.code) task->problem = problem;
        low = task->problem.code ? task->last : task->next;
        high = task->last - low < task->turn ? task->last : low + task->turn;
        task->next = high;
        int is_over = low >= task->last, is_last = is_over && --task->num_running == 0;
        PyThread_release_lock(task->lock);
        if (is_last) PyThread_release_lock(task->done);
        if (is_over) return;
        for (int64_t i = low; i < high && !problem.code; i++) {
            for (int f = 0; f < task->gather->num_fields && !problem.code; f++) {
                char *to;
                int64_t room = room_of(task, f, i, &to);
                if (task->gather->fields[f].kind == RAGGED && room != core_piece_rows(&task->axes[task->gather->fields[f].axis], i))
                    problem = (Problem){SHORT, &task->gather->fields[f], i, room, -1};
                else core_gather(&task->gather->fields[f], task->axes, task->records, i, room, to, NULL, &problem);
            }
        }
    }
}

static void run(Task *task, int num_threads) {
    /* The last to end releases `done`; threads that cannot be had are done without. */
    task->num_running = 1;
    PyThread_acquire_lock(task->done, WAIT_LOCK);
    for (int k = 1; k < num_threads; k++) {
        PyThread_acquire_lock(task->lock, WAIT_LOCK);
        task->num_running++;
        PyThread_release_lock(task->lock);
        if (PyThread_start_new_thread(work, task) == (unsigned long)-1) {
            PyThread_acquire_lock(task->lock, WAIT_LOCK);
            task->num_running--;
            PyThread_release_lock(task->lock);
            break;
        }
    }
    work(task);
    PyThread_acquire_lock(task->done, WAIT_LOCK);
    PyThread_release_lock(task->done);
}

/* The buffers of one call, released together. */
typedef struct {
    Py_buffer held[3 * MAX_AXES + 1 + 2 * MAX_FIELDS];
    int count;
} Held;

static const int64_t *hold_int64s(Held *held, PyObject *object, int64_t *count) {
    const int64_t *numbers = core_int64s(object, &held->held[held->count], count);
    if (numbers != NULL) held->count++;
    return numbers;
}

static int wrong(const char *what) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "fill: %s do not fit the samples asked for", what);
    return -1;
}

static int hold_axes(Task *task, Held *held, PyObject *axes, int64_t *total) {
    if (PyTuple_Size(axes) > MAX_AXES) return wrong("axes");
    for (Py_ssize_t k = 0; k < PyTuple_Size(axes); k++) {
        PyObject *starts, *stops, *offsets;
        if (!PyArg_ParseTuple(PyTuple_GetItem(axes, k), "OOO", &starts, &stops, &offsets)) return -1;
        Pieces *pieces = &task->axes[k];
        int64_t count, others, samples;
        if ((pieces->starts = hold_int64s(held, starts, &count)) == NULL) return -1;
        if ((pieces->stops = hold_int64s(held, stops, &others)) == NULL) return -1;
        if (count != others) return wrong("stops");
        samples = count;
        if (offsets != Py_None) {
            if ((pieces->offsets = hold_int64s(held, offsets, &samples)) == NULL) return -1;
            samples--;
            for (int64_t i = 0; i < samples; i++)
                if (pieces->offsets[i] < 0 || pieces->offsets[i + 1] < pieces->offsets[i] || pieces->offsets[i + 1] > count)
                    return wrong("offsets");
        }
        if (task->last > samples) return wrong("spans");
        if (samples < *total) *total = samples;
    }
    for (int f = 0; f < task->gather->num_fields; f++) {
        const Field *field = &task->gather->fields[f];
        if (field->kind == RECORD ? task->records == NULL : field->axis >= PyTuple_Size(axes)) return wrong("axes");
    }
    return 0;
}

/* Spans and places are checked, then used: no output may be written over them. */
static int overlap(const Py_buffer *one, const Py_buffer *other) {
    uintptr_t first = (uintptr_t)one->buf, second = (uintptr_t)other->buf;
    return one->len && other->len && first < second + (size_t)other->len && second < first + (size_t)one->len;
}

static int hold_outs(Task *task, Held *held, PyObject *outs, PyObject *places, int64_t *bytes) {
    int64_t samples = task->last - task->first;
    for (int f = 0; f < task->gather->num_fields; f++) {
        const Field *field = &task->gather->fields[f];
        int64_t rows = field->kind == RECORD ? 1 : field->length, count;
        if (field->kind == RAGGED) {
            if ((task->places[f] = hold_int64s(held, PyTuple_GetItem(places, f), &count)) == NULL) return -1;
            if (count != samples + 1 || task->places[f][0] != 0) return wrong("places");
            for (int64_t i = 0; i < samples; i++)
                if (task->places[f][i + 1] < task->places[f][i]) return wrong("places");
            rows = task->places[f][samples];
        }
        Py_buffer *buffer = &held->held[held->count];
        if (PyObject_GetBuffer(PyTuple_GetItem(outs, f), buffer, PyBUF_WRITABLE) < 0) return -1;
        held->count++;
        if (buffer->len != core_out_bytes(field, field->kind == RAGGED ? 1 : samples, rows)) return wrong("outputs");
        for (int k = 0; k + 1 < held->count; k++)
            if (overlap(&held->held[k], buffer)) return wrong("outputs that overlap");
        task->outs[f] = buffer->buf;
        if (__builtin_add_overflow(*bytes, buffer->len, bytes)) *bytes = INT64_MAX;
    }
    return 0;
}

/* fill(axes, records, first, last, outs, places, num_threads, asked): up to which samples were asked for ahead. */
PyObject *core_gather_fill(PyObject *object, PyObject *args) {
    PyObject *axes, *records, *outs, *places;
    long long first, last, asked = 0;
    int num_threads;
    if (!PyArg_ParseTuple(args, "O!OLLO!O!i|L", &PyTuple_Type, &axes, &records, &first, &last, &PyTuple_Type, &outs,
                          &PyTuple_Type, &places, &num_threads, &asked))
        return NULL;
    Gather *self = (Gather *)object;
    Task task = {.gather = self, .first = first, .last = last, .next = first};
    const int64_t *where[MAX_FIELDS];
    char *to[MAX_FIELDS];
    task.places = where;
    task.outs = to;
    Held held = {.count = 0};
    int64_t count = 0, total = INT64_MAX, bytes = 0;
    int status = 0;
    if (self->num_fields > MAX_FIELDS || PyTuple_Size(outs) != self->num_fields || PyTuple_Size(places) != self->num_fields)
        status = wrong("outputs");
    if (first < 0 || last < first) status = wrong("first and last");
    if (!status && records != Py_None && (task.records = hold_int64s(&held, records, &count)) == NULL) status = -1;
    if (!status && task.records != NULL && count < last) status = wrong("records");
    if (task.records != NULL) total = count;
    if (!status) status = hold_axes(&task, &held, axes, &total);
    if (!status) status = hold_outs(&task, &held, outs, places, &bytes);
    if (num_threads > MOST_THREADS) num_threads = MOST_THREADS;
    task.sample_bytes = !status && last > first ? bytes / (last - first) + 1 : 1;
    task.turn = TURN_BYTES / task.sample_bytes + 1;
    if (task.turn > MOST_TURN) task.turn = MOST_TURN;
    if (!status && self->num_fields) {
        task.lock = PyThread_allocate_lock();
        task.done = PyThread_allocate_lock();
        if (task.lock == NULL || task.done == NULL) {
            PyErr_NoMemory();
            status = -1;
        } else {
            CORE_BEGIN_ALLOW_THREADS
            if (last > first) asked = request_ahead(&task, &self->ahead, asked, total);
            run(&task, num_threads);
            CORE_END_ALLOW_THREADS
        }
        if (task.lock != NULL) PyThread_free_lock(task.lock);
        if (task.done != NULL) PyThread_free_lock(task.done);
    }
    for (int k = 0; k < held.count; k++) PyBuffer_Release(&held.held[k]);
    if (status) return NULL;
    if (task.problem.code) return core_raise_problem(&task.problem);
    return PyLong_FromLongLong(asked);
}
