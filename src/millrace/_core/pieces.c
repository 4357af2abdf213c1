/* Batches in slots: one thread opens a slot for a batch, then any make its pieces.
 *
 * A piece is a range of samples, whose positions, spans and bytes depend on nothing but their numbers. So a large batch
 * is made by all threads at once, and the loop helps with the batch that it waits for. Every piece has one writer. */
#include "ring.h"

#define PIECE_BYTES (256 << 10) /* some 30 us of a core: much more than to claim a piece, much less than to be preempted */

/* Errors of several pieces: the one of the first is kept, so that it is always the same. Needs the GIL. */
static void keep_error(Ring *self, Slot *slot, int piece, const Problem *problem, PyObject *error) {
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    if (piece < slot->wrong_piece) {
        PyObject *before = slot->error;
        slot->wrong_piece = piece;
        slot->problem = *problem;
        slot->error = error;
        error = before;
    }
    PyThread_release_lock(self->lock);
    Py_XDECREF(error);
}

/* The exception that is raised now: about the data it comes with the batch, else at once where the loop's thread has it. */
static void keep_raised(Ring *self, Slot *slot, int piece, Work *work) {
    PyObject *error = NULL;
    int is_expected = core_is_expected();
    core_keep_error(&error);
    if (!is_expected && work == self->work) work->stop = Py_NewRef(error);
    keep_error(self, slot, piece, &(Problem){0}, error);
}

/* What request_ahead met that is not about the data. */
static void move_stop(Ring *self, Slot *slot, Work *work, PyThreadState **state) {
    PyEval_RestoreThread(*state);
    PyObject *error = work->stop;
    if (work == self->work) Py_INCREF(error);
    else work->stop = NULL;
    keep_error(self, slot, -1, &(Problem){0}, error);
    *state = PyEval_SaveThread();
}

/* Memory for the batch of a slot, and where everything lies in it. */
static void open_slot(Ring *self, Slot *slot, Work *work, PyThreadState **state) {
    int64_t most = self->program->most, last = self->count >= 0 && self->count < most ? self->count : most;
    core_request_ahead(self->program, slot->batch, last, work, state);
    slot->landing = core_land(&self->lanes, slot);
    if (work->stop != NULL) move_stop(self, slot, work, state);
    while (!slot->problem.code && slot->error == NULL) {
        if (slot->batch > most) {
            slot->problem = (Problem){PASSED, NULL, slot->batch, 0, 0};
            break;
        }
        int64_t capacity = slot->owner == NULL ? 0 : slot->memory.len;
        if (core_measure(self->program, slot->batch, slot->memory.buf, capacity, &slot->measure, work, &slot->problem) != SPACE)
            break;
        PyEval_RestoreThread(*state);
        /* A quarter more where a ragged batch outgrew its slot: the next will be about as large. */
        int64_t bytes = slot->problem.a;
        if (bytes > self->program->fixed_bytes) bytes += bytes / 4;
        if (bytes < self->most_bytes) bytes = self->most_bytes;
        slot->problem.code = FINE;
        if (core_renew(self, slot, bytes)) keep_raised(self, slot, -1, work);
        *state = PyEval_SaveThread();
    }
}

/* Reads past the page cache are for whole batches: the disk needs many at a time. */
static int num_pieces(Ring *self, const Slot *slot, Work *work) {
    int64_t found = slot->measure.used / PIECE_BYTES, most = self->program->size;
    if (core_num_wanted(self) == 0 || core_fetch_of(self->program, work) != NULL) return 1;
    if (most > 1 << 20) most = 1 << 20;
    return (int)(found < 1 ? 1 : found < most ? found : most);
}

/* Nobody writes into the slot any more. Needs the lock. */
static void settle(Ring *self, Slot *slot) {
    int is_left = slot->state == LEFT;
    slot->state = is_left ? GONE : READY;
    if (is_left) return;
    if (!slot->problem.code && slot->error == NULL) self->bytes += slot->measure.used;
    if (slot->batch == self->next_get) core_wake_consumer(self);
}

/* Opens a slot and lets others at its pieces, except the first, which is the caller's: 0 where there is none to make. */
static int open_pieces(Ring *self, Slot *slot, int is_alone, Work *work, PyThreadState **state) {
    int64_t began = core_now();
    open_slot(self, slot, work, state);
    int is_wrong = slot->problem.code || slot->error != NULL, count = is_wrong || is_alone ? 1 : num_pieces(self, slot, work);
    Worker *next = NULL;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    self->fill_ns += core_now() - began - slot->landing;
    int is_left = slot->state == LEFT; /* the loop did not wait for it */
    if (is_wrong || is_left) settle(self, slot);
    else {
        slot->state = FILLING;
        slot->num_pieces = self->pieces = count;
        slot->num_claimed = 1;
        slot->num_done = 0;
        self->batch_bytes = slot->measure.used;
        if (count > 1) {
            core_wake_consumer(self);
            next = core_choose(self, core_num_worth(self));
        }
    }
    PyThread_release_lock(self->lock);
    core_wake(next);
    return !is_wrong && !is_left;
}

static void make_piece(Ring *self, Slot *slot, int piece, int64_t first, int64_t last, Work *work, PyThreadState **state) {
    Problem problem;
    int is_raised = 0;
    while (core_make(self->program, slot->batch, first, last, slot->memory.buf, &slot->measure, work, &problem) && !is_raised) {
        PyEval_RestoreThread(*state);
        if (problem.code != MISSING) keep_error(self, slot, piece, &problem, NULL), is_raised = 1;
        else if (core_give_missing(self->program, work)) keep_raised(self, slot, piece, work), is_raised = 1;
        *state = PyEval_SaveThread();
        if (is_raised) break;
    }
}

/* About the time that a thread with a core to itself takes for a MiB: a faster piece counts at once, a slower one little. */
static void note_pace(Ring *self, int64_t ns, int64_t bytes) {
    int64_t pace = (int64_t)((double)ns * (1 << 20) / (double)(bytes + 1));
    self->pace_ns = self->pace_ns == 0 || pace < self->pace_ns ? pace : self->pace_ns + self->pace_ns / 32 + 1;
}

void core_work_on(Ring *self, Slot *slot, int piece, int is_alone, Work *work, PyThreadState **state) {
    if (piece < 0) {
        if (!open_pieces(self, slot, is_alone, work, state)) return;
        piece = 0;
    }
    int64_t size = self->program->size, count = slot->num_pieces, began = core_now();
    int64_t first = size * piece / count, last = size * (piece + 1) / count;
    make_piece(self, slot, piece, first, last, work, state);
    int64_t took = core_now() - began;
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    note_pace(self, took, slot->measure.used / count);
    self->fill_ns += took;
    self->num_fetched += work->num_fetched;
    if (work == self->work) self->made_here += last - first;
    work->num_fetched = 0;
    if (++slot->num_done == slot->num_pieces) {
        if (self->lanes.is_used && slot->state == FILLING && !slot->problem.code && slot->error == NULL) {
            slot->state = LAUNCHING;
            PyThread_release_lock(self->lock);
            core_launch(&self->lanes, slot);
            PyThread_acquire_lock(self->lock, WAIT_LOCK);
        }
        settle(self, slot);
    }
    PyThread_release_lock(self->lock);
}
