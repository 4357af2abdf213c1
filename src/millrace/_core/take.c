/* The consumer's side of the ring: the next batch, in its order, and slots that are given back. */
#include "ring.h"

#define LATE_NS 50000 /* to ask whether a copy is done that is takes less */

/* Gives back what nobody holds any more; where the loop holds too many, leaves one to it and takes a new one. */
static int sweep(Ring *self) {
    Slot *oldest = NULL;
    int usable = 0;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        int is_free = slot->state == HELD && (slot->owner == NULL || Py_REFCNT(slot->owner) <= slot->idle);
        is_free = is_free && !self->lanes.is_used;
        if (is_free) slot->state = IDLE;
        usable += slot->state != HELD;
        if (slot->state == HELD && (oldest == NULL || slot->batch < oldest->batch)) oldest = slot;
    }
    PyThread_release_lock(self->lock);
    if (usable >= self->depth || oldest == NULL) return 0;
    /* Only the consumer touches slots that are held. */
    if (core_renew(self, oldest, self->most_bytes)) return -1;
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
    if (slot->error != NULL) return core_raise_kept(&slot->error);
    if (slot->problem.code == REFUSED) return core_raise_refused(&slot->problem);
    if (slot->problem.code) return core_raise_problem(&slot->problem);
    return Py_BuildValue("iL", (int)(slot - self->slots), (long long)slot->used);
}

static int wait_for_workers(Ring *self) {
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock_timed(self->signal, 1000000, 1);
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals(); /* Ctrl-C may have reached another thread */
}

static PyObject *get(Ring *self, int may_block, void *stream) {
    if (sweep(self) < 0) return NULL;
    Slot *slot = NULL, *own;
    int64_t began = core_now(), seen = 0;
    int was_ready = 1;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    while ((slot = ready(self, &seen)) == NULL) {
        if (self->is_closed || (self->count >= 0 && self->next_get >= self->count) || !may_block) break;
        own = core_take_ticket(self);
        if (own == NULL) self->is_waiting = 1;
        Worker *next = own == NULL ? NULL : core_choose(self, core_several(self));
        PyThread_release_lock(self->lock);
        core_wake(next);
        was_ready = 0;
        if (own != NULL) {
            self->num_in_line++;
            PyThreadState *state = PyEval_SaveThread();
            core_make_in(self, own, self->work, &state);
            PyEval_RestoreThread(state);
            if (self->work->stop != NULL) { /* Ctrl-C, or what another handler of a signal raised */
                core_raise_kept(&self->work->stop);
                return NULL;
            }
        } else if (wait_for_workers(self) < 0) {
            return NULL;
        }
        seen = 0;
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
    }
    Worker *next = NULL;
    if (slot != NULL) {
        slot->state = HELD;
        self->next_get++;
        self->depth_seen += seen;
        next = core_choose(self, core_several(self));
    }
    PyThread_release_lock(self->lock);
    core_wake(next);
    if (slot == NULL) Py_RETURN_NONE;
    /* It could not be made before the GPU had copied what lay there: the loop is far ahead of it, and waits for it. */
    if (!was_ready && slot->landing > LATE_NS) self->behind_ns += core_now() - began;
    if (!slot->problem.code && slot->error == NULL) core_use(&self->lanes, slot, stream, &slot->problem);
    return hand_over(self, slot);
}

/* Slots on a GPU that nobody holds any more. */
static int let_go(Ring *self, PyObject *numbers, void *stream, Problem *problem) {
    for (Py_ssize_t k = 0, count = numbers == NULL ? 0 : PyList_Size(numbers); k < count; k++) {
        long number = PyLong_AsLong(PyList_GetItem(numbers, k));
        if (number == -1 && PyErr_Occurred()) return -1;
        if (!self->lanes.is_used || number < 0 || number >= self->num_slots || self->slots[number].state != HELD)
            return PyErr_Format(PyExc_IndexError, "slot %ld was not handed out", number), -1;
        if (core_let_go(&self->lanes, &self->slots[number], stream, problem)) return core_raise_refused(problem), -1;
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        self->slots[number].state = IDLE;
        PyThread_release_lock(self->lock);
    }
    return 0;
}

/* get(block=True, stream=0, let go=[]): (slot, bytes used) of the next batch, or None at the end, when closed, or if it
 * is not ready. The stream is the loop's on a GPU. */
PyObject *core_ring_get(PyObject *object, PyObject *args) {
    Ring *self = (Ring *)object;
    int may_block = 1;
    unsigned long long at = 0;
    PyObject *numbers = NULL, *found = NULL;
    Problem problem;
    void *before;
    if (!PyArg_ParseTuple(args, "|pKO!", &may_block, &at, &PyList_Type, &numbers)) return NULL;
    if (self->is_getting) return core_raise("FeedError", "two threads take batches from one iterator; give each its own feed");
    if (core_lanes_enter(&self->lanes, &before, &problem)) return core_raise_refused(&problem);
    self->is_getting = 1;
    void *stream = (void *)(uintptr_t)at;
    if (let_go(self, numbers, stream, &problem) == 0) found = get(self, may_block, stream);
    self->is_getting = 0;
    PyObject *kind, *value, *trace; /* of the exception, if there is one */
    PyErr_Fetch(&kind, &value, &trace);
    core_lanes_leave(&self->lanes, before);
    PyErr_Restore(kind, value, trace);
    return found;
}
