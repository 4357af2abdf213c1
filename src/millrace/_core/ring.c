/* Ring: slots that hold whole batches, filled ahead by threads that are parked here without the GIL.
 *
 * Threads are Python's, so that they are joined like any other; each enters `work` and stays. They take batches by
 * number, so the order is exact whoever makes which. The consumer makes a batch itself rather than wait while there
 * is one to make, and wakes threads only when there are several: a wake-up costs more than a small batch.
 *
 * A slot is used again when nobody but the feed holds it, which the reference count of its owner says. That is
 * looked at by the consumer alone, with the GIL. */
#include "ring.h"

#include <stdlib.h>

static Slot *take_ticket(Ring *self) {
    if (self->is_closed || (self->count >= 0 && self->next_ticket >= self->count)) return NULL;
    if (self->next_ticket >= self->next_get + self->depth) return NULL;
    Slot *best = NULL; /* the one used last: its memory may still be in the cache */
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        if (slot->state == IDLE && (best == NULL || slot->batch > best->batch)) best = slot;
    }
    if (best == NULL) return NULL;
    best->state = FILLING;
    best->batch = self->next_ticket++;
    best->problem.code = FINE;
    return best;
}

static int64_t num_tickets(const Ring *self) {
    int64_t free_slots = 0, left = self->next_get + self->depth - self->next_ticket;
    for (int k = 0; k < self->num_slots; k++) free_slots += self->slots[k].state == IDLE;
    if (self->count >= 0 && self->count - self->next_ticket < left) left = self->count - self->next_ticket;
    return left < free_slots ? left : free_slots;
}

static int num_wanted(const Ring *self) {
    return __atomic_load_n(&self->program->ahead.is_cold, __ATOMIC_RELAXED) ? self->num_workers : self->num_hot;
}

static void wake_workers(Ring *self) {
    int wanted = num_wanted(self);
    int64_t tickets = num_tickets(self);
    int is_last = self->count >= 0 && self->next_ticket + tickets >= self->count;
    int is_cold = wanted > self->num_hot; /* then a wake-up is little, and a disk with nothing to read is much */
    if (!self->is_closed && tickets < (self->depth + 1) / 2 && !is_last && !is_cold) return;
    for (int k = 0; k < self->num_workers; k++) {
        if (!self->workers[k].is_waiting || (!self->is_closed && (k >= wanted || tickets-- <= 0))) continue;
        self->workers[k].is_waiting = 0;
        PyThread_release_lock(self->workers[k].signal);
    }
}

/* New memory for a slot, from Python; needs the GIL and that nobody else looks at the slot. */
static int renew(Ring *self, Slot *slot, int64_t bytes) {
    if (slot->owner != NULL) {
        PyBuffer_Release(&slot->memory);
        Py_CLEAR(slot->owner);
    }
    PyObject *owner = PyObject_CallFunction(self->allocate, "iL", (int)(slot - self->slots), (long long)bytes);
    if (owner == NULL) return -1;
    if (PyObject_GetBuffer(owner, &slot->memory, PyBUF_WRITABLE) < 0) {
        Py_DECREF(owner);
        return -1;
    }
    slot->owner = owner;
    slot->idle = Py_REFCNT(owner);
    if (bytes > self->most_bytes) self->most_bytes = bytes;
    return 0;
}

/* For the consumer to raise; needs the GIL. */
static void keep_error(Slot *slot) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    Py_XDECREF(kind);
    Py_XDECREF(trace);
    Py_XDECREF(slot->error);
    slot->error = value;
}

/* Makes the batch of a slot that is FILLING, with the GIL released in `state`; whatever went wrong is kept in it. */
static void make(Ring *self, Slot *slot, Work *work, PyThreadState **state) {
    int64_t began = core_now();
    int64_t most = self->program->most, last = self->count >= 0 && self->count < most ? self->count : most;
    core_request_ahead(self->program, slot->batch, last, work, state);
    for (;;) {
        if (slot->batch > most) {
            slot->problem = (Problem){PASSED, NULL, slot->batch, 0, 0};
            break;
        }
        int64_t capacity = slot->owner == NULL ? 0 : slot->memory.len;
        int code = core_make(self->program, slot->batch, slot->memory.buf, capacity, &slot->used, work, &slot->problem);
        if (code != MISSING && code != SPACE) break;
        PyEval_RestoreThread(*state);
        /* A quarter more where a ragged batch outgrew its slot: the next will be about as large. */
        int64_t bytes = slot->problem.a;
        if (code == SPACE && bytes > self->program->fixed_bytes) bytes += bytes / 4;
        if (code == SPACE && bytes < self->most_bytes) bytes = self->most_bytes;
        int status = code == MISSING ? core_give_missing(self->program, work) : renew(self, slot, bytes);
        if (status) keep_error(slot);
        *state = PyEval_SaveThread();
        if (status) break;
    }
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    slot->state = READY;
    self->fill_ns += core_now() - began;
    self->bytes += slot->used;
    self->num_fetched += work->num_fetched;
    work->num_fetched = 0;
    if (self->is_waiting && slot->batch == self->next_get) {
        self->is_waiting = 0;
        PyThread_release_lock(self->signal);
    }
    PyThread_release_lock(self->lock);
}

/* work(number): a thread's whole life. */
static PyObject *ring_work(PyObject *object, PyObject *args) {
    Ring *self = (Ring *)object;
    int number;
    if (!PyArg_ParseTuple(args, "i", &number)) return NULL;
    if (number < 0 || number >= self->num_workers) return PyErr_Format(PyExc_IndexError, "worker %d", number);
    Work *work = core_work_new(self->program, 1);
    if (work == NULL) return PyErr_NoMemory();
    int64_t waited = 0;
    Worker *own = &self->workers[number];
    PyThreadState *state = PyEval_SaveThread();
    for (;;) {
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        self->fill_wait_ns += waited;
        waited = 0;
        Slot *slot = number < num_wanted(self) ? take_ticket(self) : NULL;
        int is_over = self->is_closed || (self->count >= 0 && self->next_ticket >= self->count);
        if (slot == NULL && !is_over) own->is_waiting = 1;
        PyThread_release_lock(self->lock);
        if (slot != NULL) {
            make(self, slot, work, &state);
        } else if (is_over) {
            break;
        } else {
            int64_t began = core_now();
            PyThread_acquire_lock(own->signal, WAIT_LOCK);
            waited = core_now() - began;
        }
    }
    PyEval_RestoreThread(state);
    core_work_free(work);
    Py_RETURN_NONE;
}

/* Gives back what nobody holds any more; where the loop holds too many, leaves one to it and takes a new one. */
static int sweep(Ring *self) {
    Slot *oldest = NULL;
    int usable = 0;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        int is_free = slot->state == HELD && (slot->owner == NULL || Py_REFCNT(slot->owner) <= slot->idle);
        if (is_free) slot->state = IDLE;
        usable += slot->state != HELD;
        if (slot->state == HELD && (oldest == NULL || slot->batch < oldest->batch)) oldest = slot;
    }
    PyThread_release_lock(self->lock);
    if (usable >= self->depth || oldest == NULL) return 0;
    /* Only the consumer touches slots that are held. */
    if (renew(self, oldest, self->most_bytes)) return -1;
    oldest->batch = -1;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    oldest->state = IDLE;
    PyThread_release_lock(self->lock);
    return 0;
}

static Slot *ready(Ring *self, int64_t *depth_seen) {
    Slot *found = NULL;
    for (int k = 0; k < self->num_slots; k++) {
        if (self->slots[k].state != READY) continue;
        ++*depth_seen;
        if (self->slots[k].batch == self->next_get) found = &self->slots[k];
    }
    return found;
}

static PyObject *hand_over(Ring *self, Slot *slot) {
    if (slot->error != NULL) {
        PyObject *error = slot->error;
        slot->error = NULL;
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    if (slot->problem.code) return core_raise_problem(&slot->problem);
    return Py_BuildValue("iL", (int)(slot - self->slots), (long long)slot->used);
}

/* get(block=True): (slot, bytes used) of the next batch, or None at the end, when closed, or if it is not ready. */
static PyObject *get(Ring *self, int may_block) {
    if (sweep(self) < 0) return NULL;
    Slot *slot = NULL, *own;
    int64_t began = core_now(), seen = 0;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    while ((slot = ready(self, &seen)) == NULL) {
        if (self->is_closed || (self->count >= 0 && self->next_get >= self->count) || !may_block) break;
        own = take_ticket(self);
        if (own == NULL) self->is_waiting = 1;
        else wake_workers(self);
        PyThread_release_lock(self->lock);
        if (own != NULL) {
            self->num_in_line++;
            PyThreadState *state = PyEval_SaveThread();
            make(self, own, self->work, &state);
            PyEval_RestoreThread(state);
        } else {
            self->num_waits++;
            Py_BEGIN_ALLOW_THREADS
            PyThread_acquire_lock_timed(self->signal, 1000000, 1);
            Py_END_ALLOW_THREADS
            if (PyErr_CheckSignals() < 0) return NULL; /* Ctrl-C may have reached another thread */
        }
        seen = 0;
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
    }
    if (slot != NULL) {
        slot->state = HELD;
        self->next_get++;
        self->depth_seen += seen;
        wake_workers(self);
    }
    PyThread_release_lock(self->lock);
    self->get_ns += core_now() - began;
    if (slot == NULL) Py_RETURN_NONE;
    return hand_over(self, slot);
}

static PyObject *ring_get(PyObject *object, PyObject *args) {
    Ring *self = (Ring *)object;
    int may_block = 1;
    if (!PyArg_ParseTuple(args, "|p", &may_block)) return NULL;
    if (self->is_getting) return core_raise("FeedError", "two threads take batches from one iterator; give each its own feed");
    self->is_getting = 1;
    PyObject *found = get(self, may_block);
    self->is_getting = 0;
    return found;
}

static PyObject *ring_close(PyObject *object, PyObject *args) {
    (void)args;
    Ring *self = (Ring *)object;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    self->is_closed = 1;
    wake_workers(self);
    if (self->is_waiting) {
        self->is_waiting = 0;
        PyThread_release_lock(self->signal);
    }
    PyThread_release_lock(self->lock);
    Py_RETURN_NONE;
}

static PyObject *ring_counters(PyObject *object, PyObject *args) {
    (void)args;
    Ring *self = (Ring *)object;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    long long batches = self->next_get, waited = self->fill_wait_ns, fill = self->fill_ns, bytes = self->bytes;
    long long seen = self->depth_seen, fetched = self->num_fetched;
    PyThread_release_lock(self->lock);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:i}", "batches", batches, "get_ns", (long long)self->get_ns,
                         "fill_wait_ns", waited, "fill_ns", fill, "depth_seen", seen, "bytes", bytes, "fetched", fetched, "in_line",
                         (long long)self->num_in_line, "waits", (long long)self->num_waits, "is_cold",
                         __atomic_load_n(&self->program->ahead.is_cold, __ATOMIC_RELAXED));
}

static PyMethodDef ring_methods[] = {
    {"work", ring_work, METH_VARARGS, "work(number): makes batches until the ring is closed or the line ends."},
    {"get", ring_get, METH_VARARGS, "get(block=True): (slot, bytes used) of the next batch, or None."},
    {"close", ring_close, METH_NOARGS, "close(): ends work and get."},
    {"counters", ring_counters, METH_NOARGS, "counters(): what was counted so far."},
    {NULL, NULL, 0, NULL},
};

PyMethodDef *core_ring_methods(void) { return ring_methods; }
