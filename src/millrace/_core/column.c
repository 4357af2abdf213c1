/* Column: where the rows of one column lie, shard by shard.
 *
 * Shards are given as they are first needed, possibly while other threads read; one that was given stays. */
#include "core.h"

#include <stdlib.h>

PyTypeObject *Column_Type;

const char *core_shard(const Column *column, int64_t shard) {
    return __atomic_load_n(&column->addresses[shard], __ATOMIC_ACQUIRE);
}

int core_file(const Column *column, int64_t shard) { return __atomic_load_n(&column->files[shard], __ATOMIC_ACQUIRE); }

int64_t core_shard_of(const Column *column, int64_t row) {
    /* The last shard that starts at or before the row: empty ones before it start at the same row. */
    int64_t low = 0, high = column->num_shards;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (column->starts[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

static PyObject *column_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *starts;
    long long row_bytes;
    if (kwargs != NULL && PyDict_Size(kwargs)) return PyErr_Format(PyExc_TypeError, "Column takes no keywords");
    if (!PyArg_ParseTuple(args, "OL", &starts, &row_bytes)) return NULL;
    Column *self = (Column *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    int64_t count;
    self->starts = core_copied_int64s(starts, &count);
    if (self->starts == NULL) goto fail;
    int is_rising = count > 0 && self->starts[0] == 0 && row_bytes >= 0;
    for (int64_t k = 1; k < count && is_rising; k++) is_rising = self->starts[k] >= self->starts[k - 1];
    if (!is_rising || (row_bytes && self->starts[count - 1] > PY_SSIZE_T_MAX / row_bytes)) {
        PyErr_SetString(PyExc_ValueError, "starts must rise from 0, and rows fit in memory");
        goto fail;
    }
    self->num_shards = count - 1;
    self->num_rows = self->starts[count - 1];
    self->row_bytes = row_bytes;
    self->addresses = calloc((size_t)count, sizeof *self->addresses);
    self->shards = calloc((size_t)count, sizeof *self->shards);
    self->files = malloc((size_t)count * sizeof *self->files);
    if (self->addresses == NULL || self->shards == NULL || self->files == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (int64_t k = 0; k < count; k++) self->files[k] = -1;
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static void column_dealloc(PyObject *object) {
    Column *self = (Column *)object;
    for (int64_t k = 0; self->shards != NULL && k < self->num_shards; k++)
        if (self->addresses[k] != NULL) PyBuffer_Release(&self->shards[k]);
#ifndef _WIN32
    for (int64_t k = 0; self->files != NULL && k < self->num_shards; k++)
        if (self->files[k] >= 0) close(self->files[k]);
#endif
    free(self->files);
    free(self->addresses);
    free(self->shards);
    free(self->starts);
    core_free(object);
}

static PyObject *column_give(PyObject *object, PyObject *args) {
    Column *self = (Column *)object;
    long long shard;
    PyObject *array;
    if (!PyArg_ParseTuple(args, "LO", &shard, &array)) return NULL;
    if (shard < 0 || shard >= self->num_shards) return PyErr_Format(PyExc_IndexError, "shard %lld", shard);
    if (core_shard(self, shard) != NULL) Py_RETURN_NONE;
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    int64_t wanted = (self->starts[shard + 1] - self->starts[shard]) * self->row_bytes;
    if (buffer.len < wanted || buffer.buf == NULL) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_ValueError, "shard %lld has %zd bytes, expected %lld", shard, buffer.len, wanted);
    }
    self->shards[shard] = buffer;
    __atomic_store_n(&self->addresses[shard], (const char *)buffer.buf, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

/* read_by(shard, fd): the column closes it. */
static PyObject *column_read_by(PyObject *object, PyObject *args) {
    Column *self = (Column *)object;
    long long shard;
    int fd;
    if (!PyArg_ParseTuple(args, "Li", &shard, &fd)) return NULL;
    if (shard < 0 || shard >= self->num_shards || fd < 0 || core_file(self, shard) >= 0)
        return PyErr_Format(PyExc_ValueError, "shard %lld, file %d", shard, fd);
    __atomic_store_n(&self->files[shard], fd, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

/* missing(starts, stops): the shards of these spans that are not given yet, or None. */
static PyObject *column_missing(PyObject *object, PyObject *args) {
    Column *self = (Column *)object;
    PyObject *first, *second;
    if (!PyArg_ParseTuple(args, "OO", &first, &second)) return NULL;
    Py_buffer starts_buffer, stops_buffer;
    int64_t count, others;
    const int64_t *starts = core_int64s(first, &starts_buffer, &count);
    if (starts == NULL) return NULL;
    const int64_t *stops = core_int64s(second, &stops_buffer, &others);
    if (stops == NULL) {
        PyBuffer_Release(&starts_buffer);
        return NULL;
    }
    PyObject *found = NULL;
    int is_failed = 0;
    for (int64_t i = 0; i < count && i < others && !is_failed; i++) {
        if (starts[i] < 0 || starts[i] >= stops[i] || stops[i] > self->num_rows) continue; /* the gather says so */
        for (int64_t k = core_shard_of(self, starts[i]); k < self->num_shards && self->starts[k] < stops[i]; k++) {
            if (core_shard(self, k) != NULL || self->starts[k] == self->starts[k + 1]) continue;
            PyObject *number = PyLong_FromLongLong(k);
            if (found == NULL) found = PySet_New(NULL);
            is_failed |= number == NULL || found == NULL || PySet_Add(found, number) < 0;
            Py_XDECREF(number);
        }
    }
    PyBuffer_Release(&starts_buffer);
    PyBuffer_Release(&stops_buffer);
    if (is_failed) Py_CLEAR(found);
    if (is_failed || found != NULL) return found;
    Py_RETURN_NONE;
}

static PyMethodDef column_methods[] = {
    {"give", column_give, METH_VARARGS, "give(shard, array): the rows of one shard."},
    {"read_by", column_read_by, METH_VARARGS, "read_by(shard, fd): cold rows are read by this O_DIRECT descriptor, which the column closes."},
    {"missing", column_missing, METH_VARARGS, "missing(starts, stops): shards of these spans not given yet, or None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot column_slots[] = {
    {Py_tp_doc, "Column(starts, row_bytes): the rows of a column over shards, given as they are needed."},
    {Py_tp_new, (void *)column_new},
    {Py_tp_dealloc, (void *)column_dealloc},
    {Py_tp_methods, (void *)column_methods},
    {0, NULL},
};

int core_add_column(PyObject *module) { return core_add_type(module, "millrace._core.Column", sizeof(Column), column_slots, &Column_Type); }
