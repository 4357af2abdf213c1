/* The consumer's side of the ring: the next batch, in its order, and slots that are given back. */
#include "ring.h"

#define LATE_NS 50000 /* to ask whether a copy is done that is takes less */
#define LEAST_WAIT_US 100 /* a thread that runs may take this long to say so */
#define MOST_WAIT_US 1000000

/* Gives back what nobody holds any more; where the loop holds too many, leaves one to it and takes a new one. */
static int sweep(Ring *self) {
    Slot *oldest = NULL;
    int usable = 0;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        int is_free = slot->state == HELD && (slot->owner == NULL || Py_REFCNT(slot->owner) <= slot->idle);
        is_free = is_free && !self->lanes.is_used;
        if (slot->state == GONE) {
            Py_CLEAR(slot->error);
            is_free = 1;
        }
        if (is_free) slot->state = IDLE;
        usable += slot->state != HELD && slot->state != LEFT;
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
    return Py_BuildValue("iL", (int)(slot - self->slots), (long long)slot->measure.used);
}

/* Makes pieces, without the GIL, until the next batch is ready or there is none to make. */
static void help(Ring *self) {
    PyThreadState *state = PyEval_SaveThread();
    for (;;) {
        int piece;
        int64_t seen = 0;
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Slot *slot = ready(self, &seen) == NULL ? core_claim(self, &piece) : NULL;
        Worker *next = slot == NULL ? NULL : core_choose(self, core_several(self));
        PyThread_release_lock(self->lock);
        core_wake(next);
        if (slot == NULL) break;
        core_work_on(self, slot, piece, 0, self->work, &state);
        if (self->work->stop != NULL) break;
    }
    PyEval_RestoreThread(state);
}

static int is_settled(Ring *self) {
    int64_t seen = 0;
    return self->is_closed || ready(self, &seen) != NULL;
}

/* At most for as long as to make a batch takes, or a second where that would not help. 1 if nobody woke it, or -1 with an
 * exception. */
static int wait_for_workers(Ring *self, int is_long) {
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    int64_t us = (int64_t)((double)self->pace_ns * (double)self->batch_bytes / (1 << 20) / 1000);
    int is_done = is_settled(self);
    self->is_waiting = !is_done;
    PyThread_release_lock(self->lock);
    if (is_done) return 0;
    if (us < LEAST_WAIT_US) us = LEAST_WAIT_US;
    if (us > MOST_WAIT_US || is_long) us = MOST_WAIT_US;
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(self->signal, us, 1);
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    if (!self->is_waiting && status != PY_LOCK_ACQUIRED) /* it was woken just now: the next wait is not */
        status = PyThread_acquire_lock_timed(self->signal, 0, 0);
    self->is_waiting = 0;
    PyThread_release_lock(self->lock);
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals() < 0 ? -1 : status == PY_LOCK_FAILURE; /* Ctrl-C may have reached another thread */
}

/* A thread that has begun the next batch gets no core, it seems. Its slot is left to it, and the loop makes the batch in
 * another; 0 where it cannot, or where the thread waits for something else. */
static int make_again(Ring *self) {
    Slot *left = NULL, *slot = NULL;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    for (int k = 0; k < self->num_slots; k++)
        if (self->slots[k].batch == self->next_get && (self->slots[k].state == FILLING || self->slots[k].state == OPENING))
            left = &self->slots[k];
    int may_leave = left != NULL && !self->is_closed && !core_is_cold(self);
    if (may_leave && left->state == FILLING) may_leave = left->num_claimed == left->num_pieces;
    if (may_leave && self->lanes.is_used) may_leave = left->state == FILLING; /* to open it may wait for the GPU */
    if (may_leave) slot = core_idle_slot(self);
    if (slot != NULL) {
        left->state = LEFT;
        core_open_for(slot, self->next_get);
        self->made_again++;
    }
    PyThread_release_lock(self->lock);
    if (slot == NULL) return 0;
    PyThreadState *state = PyEval_SaveThread();
    core_work_on(self, slot, -1, 1, self->work, &state);
    PyEval_RestoreThread(state);
    return 1;
}

/* Until the next batch is ready, or none will come; -1 with an exception. */
static int await_next(Ring *self) {
    for (int is_long = 0, is_done = 0; !is_done;) {
        help(self);
        int is_late = self->work->stop == NULL ? wait_for_workers(self, is_long) : 0;
        if (is_late < 0) return -1;
        is_long = is_late && !make_again(self);
        if (self->work->stop != NULL) return core_raise_kept(&self->work->stop), -1; /* Ctrl-C, or another signal's handler */
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        is_done = is_settled(self);
        PyThread_release_lock(self->lock);
    }
    return 0;
}

static PyObject *get(Ring *self, int may_block, void *stream) {
    if (sweep(self) < 0) return NULL;
    int64_t began = core_now(), seen = 0;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    Slot *slot = ready(self, &seen);
    int was_ready = slot != NULL, is_end = self->is_closed || (self->count >= 0 && self->next_get >= self->count);
    PyThread_release_lock(self->lock);
    if (!was_ready && !is_end && may_block && await_next(self) < 0) return NULL;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    seen = 0;
    Worker *next = NULL;
    if ((slot = ready(self, &seen)) != NULL) {
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
