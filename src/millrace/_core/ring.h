/* The ring and what requests its rows ahead. */
#ifndef MILLRACE_RING_H
#define MILLRACE_RING_H

#include "core.h"

/* ahead.c: rows of cold data are asked for before they are copied. */
int64_t core_now(void);         /* nanoseconds */
int64_t core_disk_faults(void); /* of this thread */
#define AHEAD_BYTES (64 << 20) /* asked for ahead: of large samples fewer, but always the next batch */
int64_t core_ask(const Column *column, int64_t start, int64_t stop); /* bytes */
int core_touch(const Column *column, int64_t row); /* whether reading it waits for the disk */
void core_turn_cold(Ahead *ahead);
void core_note_probe(Ahead *ahead, int waited);
/* Before batch `batch` is made: asks for its rows and those of the next, at most up to `last`, where the data is cold.
 * The GIL is released in `state`. */
void core_request_ahead(const Program *program, int64_t batch, int64_t last, Work *work, PyThreadState **state);
/* After so many samples more were copied with so many faults: is it cold? Then those from `done` on are asked for. */
void core_look_at_faults(Ahead *ahead, const Program *program, const Work *work, int64_t done, int64_t samples,
                         int64_t faults);

/* lanes.c: a GPU, where batches go to one. */
typedef struct {
    int is_used, process;
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
    int (*copy)(uint64_t target, const void *source, size_t bytes, void *stream);
    int (*get_context)(void **context);
    int (*set_context)(void *context);
    int (*capture)(int *mode);
    void *context, *copies; /* the stream of the copies */
    PyThread_type_lock order;
} Lanes;
/* fetch.c: reads the rows of a batch's samples, in their order. */
Fetch *core_fetch_new(void); /* NULL where the system cannot */
void core_fetch_free(Fetch *fetch);
void core_fetch_begin(Fetch *fetch); /* of a batch */
/* The rows of sample i that could be read; -1 where no more can be. Samples are asked for one after the other. */
int core_fetch(Fetch *fetch, const Program *program, const Work *work, int64_t i, Fetched *found);
void core_fetch_end(Fetch *fetch); /* waits for what is under way */
/* program.c: what reads the next batch, or NULL where it is copied from the maps. */
Fetch *core_fetch_of(const Program *program, Work *work);

/* ring.c. IDLE -> OPENING -> FILLING (its pieces are made) -> LAUNCHING (to a GPU) -> READY -> HELD by the loop -> IDLE.
 * A slot is LEFT where the loop made its batch elsewhere, rather than wait for a thread that got no core; and GONE when
 * that thread is done with it. */
enum { IDLE, OPENING, FILLING, LAUNCHING, READY, HELD, LEFT, GONE };

typedef struct {
    PyObject *owner; /* of the memory; NULL until it is first needed */
    Py_buffer memory;
    Py_ssize_t idle; /* its reference count when nobody but the feed holds it */
    int state;
    int num_pieces, num_claimed, num_done;
    int wrong_piece; /* the first with an error, which is kept */
    int64_t batch;
    Measure measure;
    Problem problem;
    PyObject *error;
    uint64_t target;         /* of the device */
    void *copied, *let_go;   /* events: the copy is done; so is what the loop did with the device's memory */
    int is_flying;   /* a copy was queued, and nobody knows yet whether it is done */
    int64_t landing; /* nanoseconds for which the batch in it had to wait for that */
} Slot;

typedef struct {
    PyThread_type_lock signal; /* taken by its thread to wait; released by whoever wakes it */
    int is_waiting;
} Worker;

typedef struct {
    PyObject_HEAD
    Program *program;
    PyObject *allocate; /* allocate(slot, bytes) -> a writable buffer */
    Slot *slots;
    Worker *workers;
    Work *work; /* the consumer's */
    int num_slots, num_workers, num_hot, depth, is_closed, is_waiting, is_getting;
    PyThread_type_lock lock, signal; /* of everything here; of the consumer */
    /* Of num_workers, those from num_hot on work only while the data is cold, when threads mostly wait. */
    int64_t count, next_ticket, next_get, most_bytes; /* count is -1 for endless */
    int64_t pieces, batch_bytes, pace_ns; /* of the batch opened last; nanoseconds that a MiB takes */
    int64_t fill_wait_ns, fill_ns, depth_seen, bytes, num_fetched;
    int64_t made_here, made_again; /* samples, by the loop; batches, by the loop instead of a thread that had begun */
    int64_t behind_ns; /* the loop waited for a GPU that had not caught up */
    Lanes lanes;
} Ring;

int core_is_cold(const Ring *self);
int core_num_wanted(const Ring *self); /* threads that may work now */
Slot *core_idle_slot(Ring *self);
void core_open_for(Slot *slot, int64_t batch); /* OPENING */
Slot *core_claim(Ring *self, int *piece);   /* the next piece to make; -1 of a slot to open; or NULL */
int core_renew(Ring *self, Slot *slot, int64_t bytes);
int64_t core_several(const Ring *self);
int64_t core_num_worth(const Ring *self);
Worker *core_choose(Ring *self, int64_t few);
void core_wake(Worker *worker);
void core_wake_consumer(Ring *self); /* where it waits */
/* pieces.c: makes a piece, or opens a slot and makes its first, or all of it alone. The GIL is released in `state`;
 * whatever goes wrong is kept in the slot. */
void core_work_on(Ring *self, Slot *slot, int piece, int is_alone, Work *work, PyThreadState **state);
PyObject *core_ring_get(PyObject *object, PyObject *args); /* take.c */

int core_lanes_init(Lanes *lanes, PyObject *table);
void core_lanes_join(const Lanes *lanes);
int core_lanes_enter(const Lanes *lanes, void **before, Problem *problem);
void core_lanes_leave(const Lanes *lanes, void *before);
int64_t core_land(const Lanes *lanes, Slot *slot);
void core_launch(const Lanes *lanes, Slot *slot);
int core_use(const Lanes *lanes, Slot *slot, void *stream, Problem *problem);
int core_let_go(const Lanes *lanes, Slot *slot, void *stream, Problem *problem);
PyObject *core_raise_refused(const Problem *problem);

PyMethodDef *core_ring_methods(void);
int core_add_ring(PyObject *module);

#endif
