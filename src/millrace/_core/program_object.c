/* Program as a Python object: how it is described, checked and released. */
#include "ring.h"

#include <stdlib.h>

static int parts_init(Program *self, PyObject *parts) {
    self->num_parts = (int)PyTuple_Size(parts);
    self->gathers = calloc((size_t)self->num_parts + 1, sizeof *self->gathers);
    if (self->gathers == NULL) return PyErr_NoMemory(), -1;
    for (int p = 0; p < self->num_parts; p++) {
        PyObject *part = PyTuple_GetItem(parts, p);
        if (!PyObject_TypeCheck(part, Gather_Type)) return PyErr_SetString(PyExc_TypeError, "parts are Gathers"), -1;
        self->gathers[p] = (Gather *)part;
        const Gather *first = self->gathers[0], *gather = self->gathers[p];
        int is_same = gather->num_fields == first->num_fields && gather->num_fields <= MAX_FIELDS;
        for (int f = 0; f < gather->num_fields && is_same; f++) {
            const Field *one = &first->fields[f], *other = &gather->fields[f];
            is_same = one->kind == other->kind && one->out_row_bytes == other->out_row_bytes;
            is_same = is_same && one->length == other->length;
            if (other->kind != RECORD && other->axis >= self->num_axes) self->num_axes = other->axis + 1;
        }
        if (!is_same) return PyErr_SetString(PyExc_ValueError, "parts deliver different fields"), -1;
    }
    if (self->num_axes == 0) self->num_axes = 1;
    self->num_fields = self->num_parts ? self->gathers[0]->num_fields : 0;
    return self->num_parts ? 0 : (PyErr_SetString(PyExc_ValueError, "no parts"), -1);
}

/* Whether the offsets of two fields are the same in every part, so that they may lie in one place. */
static int share_offsets(const Program *self, int f, int g) {
    if (self->gathers[0]->fields[f].kind != RAGGED || self->gathers[0]->fields[g].kind != RAGGED) return 0;
    for (int k = 0; k < self->num_parts; k++)
        if (self->gathers[k]->fields[f].axis != self->gathers[k]->fields[g].axis ||
            self->gathers[k]->fields[f].first != self->gathers[k]->fields[g].first)
            return 0;
    return self->places[f] == self->places[g];
}

/* Whether two of the marks and fields share bytes of a slot: offsets that were checked would be written over. */
static int overlaps(const Program *self, const int64_t *sizes) {
    for (int a = 0; a < 3 + self->num_fields; a++)
        for (int b = 0; b < a; b++) {
            if (b >= 3 && share_offsets(self, a - 3, b - 3)) continue;
            int64_t first = a < 3 ? self->marks[a] : self->places[a - 3], second = b < 3 ? self->marks[b] : self->places[b - 3];
            if (sizes[a] && sizes[b] && first < second + sizes[b] && second < first + sizes[a]) return 1;
        }
    return 0;
}

/* Where everything lies in a slot: the marks, then the fields (of ragged ones the offsets). */
static int layout_init(Program *self, PyObject *marks, PyObject *places, long long fixed_bytes) {
    long long at[3];
    if (!PyArg_ParseTuple(marks, "LLL", &at[0], &at[1], &at[2])) return -1;
    self->fixed_bytes = fixed_bytes;
    int is_fine = PyTuple_Size(places) == self->num_fields && fixed_bytes >= 0 && fixed_bytes % ALIGN == 0;
    for (int k = 0; k < 3 && is_fine; k++) {
        self->marks[k] = at[k];
        is_fine &= at[k] >= 0 && at[k] % 8 == 0 && at[k] <= fixed_bytes - self->size * (k < 2 ? 8 : 1);
    }
    int64_t sizes[3 + MAX_FIELDS] = {self->size * 8, self->size * 8, self->size};
    for (int f = 0; f < self->num_fields && is_fine; f++) {
        const Field *field = &self->gathers[0]->fields[f];
        int64_t bytes = core_out_bytes(field, self->size, field->kind == RECORD ? 1 : field->length);
        if (field->kind == RAGGED) bytes = (self->size + 1) * 8;
        self->places[f] = PyLong_AsLongLong(PyTuple_GetItem(places, f));
        is_fine = bytes >= 0 && bytes <= fixed_bytes && self->places[f] >= 0 && self->places[f] % 8 == 0;
        is_fine = is_fine && self->places[f] <= fixed_bytes - bytes;
        sizes[3 + f] = bytes;
    }
    is_fine = is_fine && !PyErr_Occurred() && !overlaps(self, sizes);
    if (!is_fine && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fields do not fit in the slot");
    return PyErr_Occurred() ? -1 : 0;
}

/* Program(order, steps, parts, line, marks, places, fixed_bytes, find_shard); line is (start, stop or -1, batch, begin,
 * end), and how many batches are made at a time where that is more than one. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *order, *steps, *parts, *line, *marks, *places, *find_shard;
    long long fixed_bytes, start, stop, batch, begin, end, group = 1;
    if (kwargs != NULL && PyDict_Size(kwargs)) return PyErr_Format(PyExc_TypeError, "Program takes no keywords");
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!LO", &PyTuple_Type, &order, &PyTuple_Type, &steps, &PyTuple_Type, &parts,
                          &PyTuple_Type, &line, &PyTuple_Type, &marks, &PyTuple_Type, &places, &fixed_bytes, &find_shard))
        return NULL;
    if (!PyArg_ParseTuple(line, "LLLLL|L", &start, &stop, &batch, &begin, &end, &group)) return NULL;
    if (start < 0 || batch < 1 || begin < 0 || end <= begin || end > batch || group < 1 || end - begin > (1 << 28) / group)
        return PyErr_Format(PyExc_ValueError, "a line is %R", line);
    Program *self = (Program *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->parts = Py_NewRef(parts);
    self->find_shard = Py_NewRef(find_shard);
    self->start = start;
    self->stop = stop;
    self->batch = batch;
    self->begin = begin;
    self->size = (end - begin) * group;
    self->group = group;
    self->most = (INT64_MAX - start) / batch / group - 1; /* no line passes position 2^63 - 1 */
    self->num_steps = (int)PyTuple_Size(steps);
    self->steps = calloc((size_t)self->num_steps + 1, sizeof *self->steps);
    if (self->steps == NULL) PyErr_NoMemory();
    else if (!self->num_steps) PyErr_SetString(PyExc_ValueError, "a plan has no steps");
    int status = PyErr_Occurred() ? -1 : core_order_init(&self->order, order);
    if (status) self->order.mixture = NULL;
    Py_XINCREF(self->order.mixture);
    if (!status) status = parts_init(self, parts);
    for (int k = 0; !status && k < self->num_steps; k++)
        status = core_step_init(self, &self->steps[k], PyTuple_GetItem(steps, k));
    if (!status) status = core_steps_check(self);
    if (!status) status = layout_init(self, marks, places, fixed_bytes);
    if (!status) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void program_dealloc(PyObject *object) {
    Program *self = (Program *)object;
    for (int k = 0; k < self->num_held; k++) PyBuffer_Release(&self->held[k]);
    free(self->held);
    for (int k = 0; self->steps != NULL && k < self->num_steps; k++) {
        free(self->steps[k].own[0]);
        free(self->steps[k].own[1]);
        free(self->steps[k].pieces);
    }
    free(self->steps);
    free(self->gathers);
    Py_XDECREF(self->parts);
    Py_XDECREF(self->find_shard);
    Py_XDECREF(self->order.mixture);
    core_free(object);
}

/* fill(batch, memory): the bytes used, or minus the bytes needed where the memory is too small. */
static PyObject *program_fill(PyObject *object, PyObject *args) {
    Program *self = (Program *)object;
    long long batch;
    Py_buffer memory;
    if (!PyArg_ParseTuple(args, "Lw*", &batch, &memory)) return NULL;
    int is_inside = batch >= 0 && batch <= self->most, is_fine = is_inside && core_is_aligned(&memory, 8);
    if (!is_fine) PyBuffer_Release(&memory);
    if (!is_inside) return core_raise_problem(&(Problem){PASSED, NULL, batch, 0, 0});
    if (!is_fine) return NULL;
    Problem problem = {0};
    Measure measure;
    Work *work = core_work_new(self, 0);
    int status = work == NULL ? (PyErr_NoMemory(), -1) : 0;
    int64_t last = self->stop < 0 ? self->most : (self->stop - self->start - 1) / self->batch / self->group + 1;
    if (!status) {
        PyThreadState *state = core_save();
        core_request_ahead(self, batch, last < self->most ? last : self->most, work, &state);
        core_restore(state);
        if (work->stop != NULL) status = (core_raise_kept(&work->stop), -1);
    }
    while (!status) {
        CORE_BEGIN_ALLOW_THREADS
        if (core_measure(self, batch, memory.buf, memory.len, &measure, work, &problem) == FINE)
            core_make(self, batch, 0, self->size, memory.buf, &measure, work, &problem);
        CORE_END_ALLOW_THREADS
        if (problem.code != MISSING) break;
        status = core_give_missing(self, work);
    }
    core_work_free(work);
    PyBuffer_Release(&memory);
    if (status) return NULL;
    if (problem.code && problem.code != SPACE) return core_raise_problem(&problem);
    return PyLong_FromLongLong(problem.code == SPACE ? -problem.a : measure.used);
}

static PyObject *program_is_cold(PyObject *object, PyObject *args) {
    (void)args;
    return PyBool_FromLong(__atomic_load_n(&((Program *)object)->ahead.is_cold, __ATOMIC_RELAXED));
}

static PyObject *program_fetch(PyObject *object, PyObject *args) {
    int is_always = 0;
    if (!PyArg_ParseTuple(args, "|p", &is_always)) return NULL;
    __atomic_store_n(&((Program *)object)->fetches, is_always ? ALWAYS : COLD, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyMethodDef program_methods[] = {
    {"fetch", program_fetch, METH_VARARGS, "fetch(always=False): cold rows, or all, are read by the files that columns were given."},
    {"is_cold", program_is_cold, METH_NOARGS, "is_cold(): whether rows are asked for ahead of the copy."},
    {"fill", program_fill, METH_VARARGS, "fill(batch, memory): bytes used, or minus those needed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc, "Program(order, steps, parts, line, marks, places, fixed_bytes, find_shard): makes any batch of a line."},
    {Py_tp_new, (void *)program_new},
    {Py_tp_dealloc, (void *)program_dealloc},
    {Py_tp_methods, (void *)program_methods},
    {0, NULL},
};

int core_add_program(PyObject *module) { return core_add_type(module, "millrace._core.Program", sizeof(Program), program_slots, &Program_Type); }
