/* Gather: the fields of a view and their columns, as an object. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>

PyTypeObject *Gather_Type;

static int64_t stored_bytes(int cast, int64_t item_bytes) {
    static const int64_t sizes[] = {0, 1, 1, 2, 2, 4, 4, 2, 2};
    return cast == COPY ? item_bytes : sizes[cast];
}

/* Which items of the last axis, each inside the `group` there are. */
static int items_init(Field *field, PyObject *items, long long group) {
    field->num_items = PyTuple_Size(items);
    if (field->num_items <= 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "items are empty");
        return -1;
    }
    field->items = calloc((size_t)field->num_items, sizeof(int64_t));
    if (field->items == NULL) return PyErr_NoMemory(), -1;
    for (int64_t k = 0; k < field->num_items; k++) {
        field->items[k] = PyLong_AsLongLong(PyTuple_GetItem(items, k));
        if (PyErr_Occurred()) return -1;
        if (field->items[k] < 0 || field->items[k] >= group) {
            PyErr_Format(PyExc_IndexError, "field %s: an item is outside the %lld of a row", field->name, group);
            return -1;
        }
    }
    return 0;
}

/* The number behind the rows of a padded field, as it is delivered. */
static int fill_init(Field *field, PyObject *fill) {
    char *bytes;
    Py_ssize_t count;
    if (PyBytes_AsStringAndSize(fill, &bytes, &count) < 0) return -1;
    if (field->kind != PADDED || count != field->out_item_bytes || count > (Py_ssize_t)sizeof field->fill) {
        PyErr_Format(PyExc_ValueError, "field %s cannot be filled with %zd bytes", field->name, count);
        return -1;
    }
    memcpy(field->fill, bytes, (size_t)count);
    field->fill_bytes = count;
    return 0;
}

static int field_init(Field *field, PyObject *columns, PyObject *description) {
    PyObject *items, *fill = Py_None;
    int number;
    long long first, length, row_items, group, item_bytes;
    const char *name;
    if (!PyArg_ParseTuple(description, "siiiiLLLLLO|O", &name, &number, &field->kind, &field->axis, &field->cast, &first,
                          &length, &row_items, &group, &item_bytes, &items, &fill))
        return -1;
    PyObject *column = number < 0 || number >= PyTuple_Size(columns) ? NULL : PyTuple_GetItem(columns, number);
    if (column == NULL || !PyObject_TypeCheck(column, Column_Type)) {
        PyErr_Format(PyExc_TypeError, "field %s: column %d is not there", name, number);
        return -1;
    }
    field->column = (Column *)column;
    field->number = number;
    field->first = first;
    field->length = length;
    field->row_items = row_items;
    field->group = group;
    snprintf(field->name, sizeof field->name, "%s", name);
    int is_plain = field->kind >= DENSE && field->kind <= START && field->cast >= COPY && field->cast <= FROM_BF16;
    is_plain = is_plain && first >= 0 && length >= 0 && first <= INT64_MAX - length;
    is_plain = is_plain && row_items >= 0 && group >= 1 && row_items % group == 0;
    is_plain = is_plain && field->axis >= 0 && field->axis < MAX_AXES && item_bytes >= 1;
    is_plain = is_plain && (field->kind != RECORD || field->axis == 0); /* rows of records are found by no axis */
    is_plain = is_plain && ((field->kind != LENGTHS && field->kind != START) || length == 1);
    int64_t row_bytes, out_items = row_items, out_bytes = field->cast == COPY ? item_bytes : field->cast >= FROM_F16 ? 4 : 8;
    field->item_bytes = is_plain ? stored_bytes(field->cast, item_bytes) : 0;
    is_plain = is_plain && !__builtin_mul_overflow(row_items, field->item_bytes, &row_bytes);
    if (!is_plain || row_bytes != field->column->row_bytes) {
        PyErr_Format(PyExc_ValueError, "field %s is not one that can be gathered", name);
        return -1;
    }
    if (items != Py_None) {
        if (items_init(field, items, group) < 0) return -1;
        if (__builtin_mul_overflow(row_items / group, field->num_items, &out_items)) out_items = -1;
    }
    if (out_items < 0 || __builtin_mul_overflow(out_items, out_bytes, &field->out_row_bytes)) {
        PyErr_Format(PyExc_ValueError, "field %s has rows larger than memory", name);
        return -1;
    }
    if (READS_NOTHING(field->kind)) field->out_row_bytes = field->kind == MASK ? 1 : 8;
    field->is_run = 1;
    for (int64_t k = 1; k < field->num_items; k++) field->is_run &= field->items[k] == field->items[k - 1] + 1;
    field->num_groups = row_items / group;
    field->out_item_bytes = out_bytes;
    return fill == Py_None ? 0 : fill_init(field, fill);
}

static PyObject *gather_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *columns, *fields;
    if (kwargs != NULL && PyDict_Size(kwargs)) return PyErr_Format(PyExc_TypeError, "Gather takes no keywords");
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &columns, &PyTuple_Type, &fields)) return NULL;
    Gather *self = (Gather *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->columns = Py_NewRef(columns);
    self->fields = calloc((size_t)PyTuple_Size(fields) + 1, sizeof(Field));
    if (self->fields == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t f = 0; f < PyTuple_Size(fields); f++) {
        self->num_fields++;
        if (field_init(&self->fields[f], columns, PyTuple_GetItem(fields, f)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static void gather_dealloc(PyObject *object) {
    Gather *self = (Gather *)object;
    for (int f = 0; self->fields != NULL && f < self->num_fields; f++) free(self->fields[f].items);
    free(self->fields);
    Py_XDECREF(self->columns);
    core_free(object);
}

static PyObject *gather_is_cold(PyObject *object, PyObject *args) {
    (void)args;
    return PyBool_FromLong(__atomic_load_n(&((Gather *)object)->ahead.is_cold, __ATOMIC_RELAXED));
}

static PyMethodDef gather_methods[] = {
    {"is_cold", gather_is_cold, METH_NOARGS, "is_cold(): whether rows are asked for ahead of the copy."},
    {"fill", core_gather_fill, METH_VARARGS, "fill(axes, records, first, last, outs, places, num_threads, asked=0)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gather_slots[] = {
    {Py_tp_doc, "Gather(columns, fields): copies samples of these fields."},
    {Py_tp_new, (void *)gather_new},
    {Py_tp_dealloc, (void *)gather_dealloc},
    {Py_tp_methods, (void *)gather_methods},
    {0, NULL},
};

int core_add_gather(PyObject *module) { return core_add_type(module, "millrace._core.Gather", sizeof(Gather), gather_slots, &Gather_Type); }
