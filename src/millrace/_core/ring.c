/* Ring: slots that hold whole batches, filled ahead by threads that are parked here without the GIL.
 *
 * Threads are Python's, so that they are joined like any other; each enters `work` and stays. They take batches by
 * number and make the pieces of the oldest first, so the order is exact whoever makes which, and the number of threads
 * has nothing to do with that of slots. The consumer makes pieces too rather than wait while there are any, and wakes
 * threads only when there are many: a wake-up costs more than a small batch.
 *
 * A slot is used again when nobody but the feed holds it, which the reference count of its owner says. That is
 * looked at by the consumer alone, with the GIL. Of a slot whose batch is on a GPU, Python says so. */
#include "ring.h"

#include <limits.h>
#include <stdlib.h>

#define MANY_PIECES 16 /* are worth a wake-up, also where that is less than a batch */

/* The one used last, whose memory may still be in the cache; on a GPU the one let go longest ago, so that its copy
 * waits for no step that was just queued. */
Slot *core_idle_slot(Ring *self) {
    Slot *best = NULL;
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        if (slot->state != IDLE) continue;
        if (best == NULL || (slot->batch > best->batch) != self->lanes.is_used) best = slot;
    }
    return best;
}

void core_open_for(Slot *slot, int64_t batch) {
    slot->state = OPENING;
    slot->batch = batch;
    slot->problem.code = FINE;
    slot->wrong_piece = INT_MAX;
    slot->num_pieces = slot->num_claimed = 0;
}

static Slot *take_ticket(Ring *self) {
    if (self->count >= 0 && self->next_ticket >= self->count) return NULL;
    if (self->next_ticket >= self->next_get + self->depth) return NULL;
    Slot *slot = core_idle_slot(self);
    if (slot != NULL) core_open_for(slot, self->next_ticket++);
    return slot;
}

Slot *core_claim(Ring *self, int *piece) {
    Slot *oldest = NULL;
    if (self->is_closed) return NULL;
    for (int k = 0; k < self->num_slots; k++) {
        Slot *slot = &self->slots[k];
        if (slot->state != FILLING || slot->num_claimed == slot->num_pieces) continue;
        if (oldest == NULL || slot->batch < oldest->batch) oldest = slot;
    }
    *piece = oldest == NULL ? -1 : oldest->num_claimed++;
    return oldest == NULL ? take_ticket(self) : oldest;
}

static int64_t num_tickets(const Ring *self) {
    int64_t free_slots = 0, left = self->next_get + self->depth - self->next_ticket;
    for (int k = 0; k < self->num_slots; k++) free_slots += self->slots[k].state == IDLE;
    if (self->count >= 0 && self->count - self->next_ticket < left) left = self->count - self->next_ticket;
    return left < free_slots ? left : free_slots;
}

int core_is_cold(const Ring *self) { return __atomic_load_n(&self->program->ahead.is_cold, __ATOMIC_RELAXED); }

int core_num_wanted(const Ring *self) { return core_is_cold(self) ? self->num_workers : self->num_hot; }

/* Whether threads have nothing to do here any more. */
static int is_over(const Ring *self) {
    if (self->is_closed) return 1;
    if (self->count < 0 || self->next_ticket < self->count) return 0;
    for (int k = 0; k < self->num_slots; k++) {
        const Slot *slot = &self->slots[k];
        if (slot->state == OPENING || (slot->state == FILLING && slot->num_claimed < slot->num_pieces)) return 0;
    }
    return 1;
}

static Worker *waiting(Ring *self, int wanted) {
    for (int k = 0; k < wanted; k++)
        if (self->workers[k].is_waiting) {
            self->workers[k].is_waiting = 0;
            return &self->workers[k];
        }
    return NULL;
}

/* A thread that waits and may work now if there are `few` batches to make, or of one any piece; or NULL. Whoever asks wakes
 * it, after the lock is given back: a wake-up takes long enough for others to want it. It wakes the next, so the loop's
 * thread wakes one. */
Worker *core_choose(Ring *self, int64_t few) {
    if (is_over(self)) return waiting(self, self->num_workers);
    int64_t tickets = num_tickets(self), pieces = tickets * self->pieces;
    for (int k = 0; k < self->num_slots; k++)
        if (self->slots[k].state == FILLING) pieces += self->slots[k].num_pieces - self->slots[k].num_claimed;
    int is_last = tickets > 0 && self->count >= 0 && self->next_ticket + tickets >= self->count;
    few = few == 1 ? 1 : few * self->pieces;
    if (few > MANY_PIECES) few = MANY_PIECES;
    if (core_is_cold(self)) few = 1; /* then a wake-up is little, and a disk with nothing to read is much */
    return pieces <= 0 || (pieces < few && !is_last) ? NULL : waiting(self, core_num_wanted(self));
}

int64_t core_several(const Ring *self) { return (self->depth + 1) / 2; }

/* How many batches are worth one more thread: while some lie ready, several, since threads that take turns cost the
 * loop's thread its caches. */
int64_t core_num_worth(const Ring *self) {
    for (int k = 0; k < self->num_slots; k++)
        if (self->slots[k].state == READY) return core_several(self);
    return 1;
}

void core_wake(Worker *worker) {
    if (worker != NULL) PyThread_release_lock(worker->signal);
}

void core_wake_consumer(Ring *self) {
    if (!self->is_waiting) return;
    self->is_waiting = 0;
    PyThread_release_lock(self->signal);
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
        int piece, is_last = is_over(self);
        Slot *slot = number < core_num_wanted(self) ? core_claim(self, &piece) : NULL;
        Worker *next = slot == NULL && !is_last ? NULL : core_choose(self, core_num_worth(self));
        if (slot == NULL && !is_last) own->is_waiting = 1;
        PyThread_release_lock(self->lock);
        core_wake(next);
        if (slot != NULL) {
            core_work_on(self, slot, piece, 0, work, &state);
        } else if (is_last) {
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
    core_wake_consumer(self);
    PyThread_release_lock(self->lock);
    Py_RETURN_NONE;
}

static PyObject *ring_counters(PyObject *object, PyObject *args) {
    (void)args;
    Ring *self = (Ring *)object;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    long long batches = self->next_get, waited = self->fill_wait_ns, fill = self->fill_ns, bytes = self->bytes;
    long long seen = self->depth_seen, fetched = self->num_fetched, pieces = self->pieces;
    long long here = self->made_here, again = self->made_again;
    PyThread_release_lock(self->lock);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "batches", batches, "fill_wait_ns", waited, "fill_ns", fill,
                         "depth_seen", seen, "bytes", bytes, "fetched", fetched, "pieces", pieces, "samples_here", here,
                         "made_again", again);
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
