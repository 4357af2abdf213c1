/* Ring as a Python object: made and released. */
#include "ring.h"

#include <stdlib.h>

static PyThread_type_lock new_signal(void) {
    PyThread_type_lock lock = PyThread_allocate_lock();
    if (lock != NULL) PyThread_acquire_lock(lock, WAIT_LOCK);
    return lock;
}

/* Ring(program, allocate, count or -1, depth, slots, workers, more workers while the data is cold, lanes of a GPU or None) */
static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *program, *allocate, *lanes = Py_None;
    long long count;
    int depth, num_slots, num_workers, num_more = 0;
    if (kwargs != NULL && PyDict_Size(kwargs)) return PyErr_Format(PyExc_TypeError, "Ring takes no keywords");
    if (!PyArg_ParseTuple(args, "O!OLiii|iO", Program_Type, &program, &allocate, &count, &depth, &num_slots, &num_workers,
                          &num_more, &lanes))
        return NULL;
    if (depth < 1 || num_slots <= depth || num_slots > 1 << 20 || num_workers < 0 || num_workers > 1 << 16 || num_more < 0 ||
        num_more > 1 << 16)
        return PyErr_Format(PyExc_ValueError, "a ring of depth %d with %d slots, %d workers and %d more", depth, num_slots,
                            num_workers, num_more);
    Ring *self = (Ring *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->program = (Program *)Py_NewRef(program);
    self->allocate = Py_NewRef(allocate);
    self->depth = depth;
    self->num_hot = num_workers;
    num_workers += num_more;
    self->lock = PyThread_allocate_lock();
    self->signal = new_signal();
    self->work = core_work_new(self->program, 1);
    self->slots = calloc((size_t)num_slots, sizeof(Slot));
    self->workers = calloc((size_t)num_workers + 1, sizeof(Worker));
    self->count = count;
    self->pieces = 1;
    if (self->lock == NULL || self->signal == NULL || self->work == NULL || self->slots == NULL || self->workers == NULL)
        goto fail;
    self->num_slots = num_slots;
    if (lanes != Py_None && core_lanes_init(&self->lanes, lanes) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    for (int k = 0; k < num_slots; k++) self->slots[k].batch = -1;
    for (int k = 0; k < num_workers; k++, self->num_workers++)
        if ((self->workers[k].signal = new_signal()) == NULL) goto fail;
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return PyErr_NoMemory();
}

/* Memory goes when no copy needs it, however the ring came to its end. A forked child has no GPU. */
static void land_all(Ring *self) {
    void *before;
    Problem problem;
    if (!self->lanes.is_used || self->lanes.process != getpid()) return;
    Py_BEGIN_ALLOW_THREADS
    if (core_lanes_enter(&self->lanes, &before, &problem) == 0) {
        for (int k = 0; k < self->num_slots; k++) core_land(&self->lanes, &self->slots[k]);
        core_lanes_leave(&self->lanes, before);
    }
    Py_END_ALLOW_THREADS
}

static void ring_dealloc(PyObject *object) {
    Ring *self = (Ring *)object;
    land_all(self);
    for (int k = 0; k < self->num_slots; k++) {
        if (self->slots[k].owner != NULL) PyBuffer_Release(&self->slots[k].memory);
        Py_XDECREF(self->slots[k].owner);
        Py_XDECREF(self->slots[k].error);
    }
    for (int k = 0; k < self->num_workers; k++) PyThread_free_lock(self->workers[k].signal);
    if (self->lock != NULL) PyThread_free_lock(self->lock);
    if (self->signal != NULL) PyThread_free_lock(self->signal);
    if (self->lanes.order != NULL) PyThread_free_lock(self->lanes.order);
    core_work_free(self->work);
    free(self->slots);
    free(self->workers);
    Py_XDECREF((PyObject *)self->program);
    Py_XDECREF(self->allocate);
    core_free(object);
}

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, "Ring(program, allocate, count, depth, slots, workers): batches made ahead."},
    {Py_tp_new, (void *)ring_new},
    {Py_tp_dealloc, (void *)ring_dealloc},
    {Py_tp_methods, NULL},
    {0, NULL},
};

int core_add_ring(PyObject *module) {
    ring_slots[3].pfunc = core_ring_methods();
    return core_add_type(module, "millrace._core.Ring", sizeof(Ring), ring_slots, NULL);
}
