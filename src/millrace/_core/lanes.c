/* Lanes: what is done for a batch that goes to a GPU, by functions of the CUDA driver whose addresses Python gives.
 *
 * A slot has memory of the host and of the device. Whoever makes a batch also queues its copy, on a stream of the
 * feed's own, so that the training loop's thread makes two calls per slot: its stream waits for the copy, and notes
 * where the slot was let go. Copies wait for the second, and the host's memory is written again after the first. */
#include "ring.h"


static const char *NAMES[] = {"cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync_v2",
                              "cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"};
enum { DO_WAIT, DO_RECORD, DO_SYNCHRONIZE, DO_COPY, DO_GET, DO_SET, DO_CAPTURE };

static int refused(Problem *problem, int function, int code) {
    if (code) *problem = (Problem){REFUSED, NULL, function, code, 0};
    return code;
}

PyObject *core_raise_refused(const Problem *problem) {
    return core_raise("FeedError", "the GPU refused %s with error %lld; an earlier kernel may have failed: run with "
                      "CUDA_LAUNCH_BLOCKING=1", NAMES[problem->a], (long long)problem->b);
}

/* Addresses of the seven functions in the order of NAMES, the context, and the stream of the copies. */
int core_lanes_init(Lanes *lanes, PyObject *table) {
    unsigned long long at[9];
    if (!PyArg_ParseTuple(table, "KKKKKKKKK", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5], &at[6], &at[7], &at[8]))
        return -1;
    for (int k = 0; k < 7; k++)
        if (at[k] == 0) return PyErr_Format(PyExc_ValueError, "%s has no address", NAMES[k]), -1;
    lanes->wait = (int (*)(void *, void *, unsigned))(uintptr_t)at[DO_WAIT];
    lanes->record = (int (*)(void *, void *))(uintptr_t)at[DO_RECORD];
    lanes->synchronize = (int (*)(void *))(uintptr_t)at[DO_SYNCHRONIZE];
    lanes->copy = (int (*)(uint64_t, const void *, size_t, void *))(uintptr_t)at[DO_COPY];
    lanes->get_context = (int (*)(void **))(uintptr_t)at[DO_GET];
    lanes->set_context = (int (*)(void *))(uintptr_t)at[DO_SET];
    lanes->capture = (int (*)(int *))(uintptr_t)at[DO_CAPTURE];
    lanes->context = (void *)(uintptr_t)at[7];
    lanes->copies = (void *)(uintptr_t)at[8];
    lanes->order = PyThread_allocate_lock();
    if (lanes->order == NULL) return PyErr_NoMemory(), -1;
    lanes->process = getpid();
    lanes->is_used = 1;
    return 0;
}

/* A thread of the feed's own: in the GPU's context, and no disturbance of a CUDA graph that the loop captures. */
void core_lanes_join(const Lanes *lanes) {
    int relaxed = 2;
    if (!lanes->is_used) return;
    lanes->set_context(lanes->context);
    lanes->capture(&relaxed);
}

/* The loop's thread may be in another context, or none: it gets back what it had. */
int core_lanes_enter(const Lanes *lanes, void **before, Problem *problem) {
    *before = lanes->context;
    if (!lanes->is_used) return 0;
    int code = lanes->get_context(before);
    if (code) return refused(problem, DO_GET, code);
    return *before == lanes->context ? 0 : refused(problem, DO_SET, lanes->set_context(lanes->context));
}

void core_lanes_leave(const Lanes *lanes, void *before) {
    if (lanes->is_used && before != lanes->context) lanes->set_context(before);
}

/* Waits until the slot's memory of the host was copied; in nanoseconds. */
int64_t core_land(const Lanes *lanes, Slot *slot) {
    if (!slot->is_flying) return 0;
    int64_t began = core_now();
    refused(&slot->problem, DO_SYNCHRONIZE, lanes->synchronize(slot->copied));
    slot->is_flying = 0;
    return core_now() - began;
}

/* Queues the copy of a batch that was made, after everything that was done with the device's memory before. */
void core_launch(const Lanes *lanes, Slot *slot) {
    if (!lanes->is_used) return;
    PyThread_acquire_lock(lanes->order, WAIT_LOCK); /* else a copy would also wait for what another waits for */
    int is_refused = refused(&slot->problem, DO_WAIT, lanes->wait(lanes->copies, slot->let_go, 0));
    if (!is_refused) {
        slot->is_flying = 1;
        int code = lanes->copy(slot->target, slot->memory.buf, (size_t)slot->measure.used, lanes->copies);
        if (!refused(&slot->problem, DO_COPY, code)) refused(&slot->problem, DO_RECORD, lanes->record(slot->copied, lanes->copies));
    }
    PyThread_release_lock(lanes->order);
}

/* What the loop queues from now on comes after the copy. */
int core_use(const Lanes *lanes, Slot *slot, void *stream, Problem *problem) {
    return lanes->is_used ? refused(problem, DO_WAIT, lanes->wait(stream, slot->copied, 0)) : 0;
}

/* The loop is done with the slot, as soon as what it has queued is. */
int core_let_go(const Lanes *lanes, Slot *slot, void *stream, Problem *problem) {
    return refused(problem, DO_RECORD, lanes->record(slot->let_go, stream));
}
