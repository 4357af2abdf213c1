/* Ring: slots that hold whole batches, filled ahead by threads that are parked here without the GIL.
 *
 * Threads are Python's, so that they are joined like any other; each enters `work` and stays. They take batches by
 * number, so the order is exact whoever makes which. The consumer makes a batch itself rather than wait while there
 * is one to make, and wakes threads only when there are several: a wake-up costs more than a small batch.
 *
 * A slot is used again when nobody but the feed holds it, which the reference count of its owner says. That is
 * looked at by the consumer alone, with the GIL. Of a slot whose batch is on a GPU, Python says so. */
#include "ring.h"

#include <stdlib.h>

Slot *core_take_ticket(Ring *self) {
    if (self->is_closed || (self->count >= 0 && self->next_ticket >= self->count)) return NULL;
    if (self->next_ticket >= self->next_get + self->depth) return NULL;
    /* The one used last, whose memory may still be in the cache; on a GPU the one let go longest ago, so that its copy
     * waits for no step that was just queued. */
    Slot *best = NULL;
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        if (slot->state != IDLE) continue;
        if (best == NULL || (slot->batch > best->batch) != self->lanes.is_used) best = slot;
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

static int is_cold(const Ring *self) { return __atomic_load_n(&self->program->ahead.is_cold, __ATOMIC_RELAXED); }

static int num_wanted(const Ring *self) { return is_cold(self) ? self->num_workers : self->num_hot; }

/* A thread that waits and may work now if there are `few` batches to make, or NULL. Whoever asks wakes it, after the lock
 * is given back: a wake-up takes long enough for others to want it. It wakes the next, so the loop's thread wakes one. */
Worker *core_choose(Ring *self, int64_t few) {
    int64_t tickets = num_tickets(self);
    int is_last = self->count >= 0 && self->next_ticket + tickets >= self->count;
    if (is_cold(self)) few = 1; /* then a wake-up is little, and a disk with nothing to read is much */
    if (tickets <= 0 || (tickets < few && !is_last)) return NULL;
    for (int k = 0, wanted = num_wanted(self); k < wanted; k++)
        if (self->workers[k].is_waiting) {
            self->workers[k].is_waiting = 0;
            return &self->workers[k];
        }
    return NULL;
}

int64_t core_several(const Ring *self) { return (self->depth + 1) / 2; }

/* How many batches are worth one more thread: while some lie ready, several, since threads that take turns cost the
 * loop's thread its caches. */
static int64_t num_worth(const Ring *self) {
    for (int k = 0; k < self->num_slots; k++)
        if (self->slots[k].state == READY) return core_several(self);
    return 1;
}

void core_wake(Worker *worker) {
    if (worker != NULL) PyThread_release_lock(worker->signal);
}

/* New memory for a slot, from Python; needs the GIL and that nobody else looks at the slot. */
int core_renew(Ring *self, Slot *slot, int64_t bytes) {
    if (slot->is_flying) {
        Py_BEGIN_ALLOW_THREADS
        core_land(&self->lanes, slot);
        Py_END_ALLOW_THREADS
        if (slot->problem.code) return core_raise_refused(&slot->problem), -1;
    }
    if (slot->owner != NULL) {
        PyBuffer_Release(&slot->memory);
        Py_CLEAR(slot->owner);
    }
    PyObject *owner = PyObject_CallFunction(self->allocate, "iL", (int)(slot - self->slots), (long long)bytes);
    if (owner != NULL && self->lanes.is_used) {
        unsigned long long target, copied, let_go;
        PyObject *all = owner;
        owner = NULL;
        if (PyArg_ParseTuple(all, "OKKK", &owner, &target, &copied, &let_go)) {
            Py_INCREF(owner);
            slot->target = target;
            slot->copied = (void *)(uintptr_t)copied;
            slot->let_go = (void *)(uintptr_t)let_go;
        }
        Py_DECREF(all);
    }
    if (owner == NULL) return -1;
    if (PyObject_GetBuffer(owner, &slot->memory, PyBUF_WRITABLE) < 0) return Py_DECREF(owner), -1;
    int is_fine = core_is_aligned(&slot->memory, 8);
    if (is_fine && slot->memory.len < bytes)
        PyErr_Format(PyExc_ValueError, "a slot has %zd bytes, expected %lld", slot->memory.len, (long long)bytes), is_fine = 0;
    if (!is_fine) {
        PyBuffer_Release(&slot->memory);
        Py_DECREF(owner);
        return -1;
    }
    slot->owner = owner;
    slot->idle = Py_REFCNT(owner);
    if (bytes > self->most_bytes) self->most_bytes = bytes;
    return 0;
}

/* Makes the batch of a slot that is FILLING, with the GIL released in `state`; whatever went wrong is kept in it. */
void core_make_in(Ring *self, Slot *slot, Work *work, PyThreadState **state) {
    int64_t began = core_now();
    int64_t most = self->program->most, last = self->count >= 0 && self->count < most ? self->count : most;
    core_request_ahead(self->program, slot->batch, last, work, state);
    slot->landing = core_land(&self->lanes, slot);
    began += slot->landing;
    while (!slot->problem.code && work->stop == NULL) {
        if (slot->batch > most) {
            slot->problem = (Problem){PASSED, NULL, slot->batch, 0, 0};
            break;
        }
        int64_t capacity = slot->owner == NULL ? 0 : slot->memory.len;
        int code = core_make(self->program, slot->batch, slot->memory.buf, capacity, &slot->used, work, &slot->problem);
        if (code == FINE) core_launch(&self->lanes, slot);
        if (code != MISSING && code != SPACE) break;
        slot->problem.code = FINE;
        PyEval_RestoreThread(*state);
        /* A quarter more where a ragged batch outgrew its slot: the next will be about as large. */
        int64_t bytes = slot->problem.a;
        if (code == SPACE && bytes > self->program->fixed_bytes) bytes += bytes / 4;
        if (code == SPACE && bytes < self->most_bytes) bytes = self->most_bytes;
        int status = code == MISSING ? core_give_missing(self->program, work) : core_renew(self, slot, bytes);
        /* For the consumer to raise when it comes to the batch; what is not about the data, at once. */
        if (status) core_keep_error(core_is_expected() ? &slot->error : &work->stop);
        *state = PyEval_SaveThread();
        if (status) break;
    }
    if (work->stop != NULL && work != self->work) { /* of a thread: it comes with the batch */
        slot->error = work->stop;
        work->stop = NULL;
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
    core_lanes_join(&self->lanes);
    for (;;) {
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        self->fill_wait_ns += waited;
        waited = 0;
        Slot *slot = number < num_wanted(self) ? core_take_ticket(self) : NULL;
        Worker *next = slot == NULL ? NULL : core_choose(self, num_worth(self));
        int is_over = self->is_closed || (self->count >= 0 && self->next_ticket >= self->count);
        if (slot == NULL && !is_over) own->is_waiting = 1;
        PyThread_release_lock(self->lock);
        core_wake(next);
        if (slot != NULL) {
            core_make_in(self, slot, work, &state);
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

static PyObject *ring_close(PyObject *object, PyObject *args) {
    (void)args;
    Ring *self = (Ring *)object;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    self->is_closed = 1;
    for (int k = 0; k < self->num_workers; k++) {
        if (self->workers[k].is_waiting) PyThread_release_lock(self->workers[k].signal);
        self->workers[k].is_waiting = 0;
    }
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
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "batches", batches, "fill_wait_ns", waited, "fill_ns", fill, "depth_seen",
                         seen, "bytes", bytes, "fetched", fetched, "in_line", (long long)self->num_in_line);
}

static PyObject *ring_behind(PyObject *object, PyObject *args) {
    (void)args;
    return PyLong_FromLongLong(((Ring *)object)->behind_ns);
}

static PyMethodDef ring_methods[] = {
    {"work", ring_work, METH_VARARGS, "work(number): makes batches until the ring is closed or the line ends."},
    {"get", core_ring_get, METH_VARARGS, "get(block=True, stream=0, let go=[]): (slot, bytes used) of the next batch, or None."},
    {"close", ring_close, METH_NOARGS, "close(): ends work and get."},
    {"behind_ns", ring_behind, METH_NOARGS, "behind_ns(): how long the consumer has waited for a GPU that was behind."},
    {"counters", ring_counters, METH_NOARGS, "counters(): what was counted so far."},
    {NULL, NULL, 0, NULL},
};

PyMethodDef *core_ring_methods(void) { return ring_methods; }
