/* Orders: which sample stands at each position. Twins of order/orders.py. */
#include "core.h"

/* Runs of positions in one epoch: [first, *last), their places in it written to samples. */
static uint64_t epoch_run(uint64_t n, const int64_t *positions, int64_t first, int64_t count, uint64_t *samples,
                          int64_t *last) {
    uint64_t epoch = (uint64_t)positions[first] / n, begin = epoch * n;
    int64_t i = first;
    for (; i < count && (uint64_t)positions[i] >= begin && (uint64_t)positions[i] - begin < n; i++)
        samples[i] = (uint64_t)positions[i] - begin;
    *last = i;
    return epoch;
}

static void shuffled(const Order *order, uint64_t epoch, uint64_t *samples, int64_t count) {
    uint32_t keys[MAX_ROUNDS];
    core_round_keys(order->seed, 0, epoch, order->all.rounds, keys);
    core_permute(&order->all, keys, samples, (size_t)count, 0);
}

/* Some samples of one window, `count` at most CHUNK. */
#define CHUNK 256

static void block_chunk(const Order *order, uint64_t epoch, uint64_t window, const Sides *sides, uint64_t *samples,
                        int64_t count) {
    uint64_t size = order->block * order->window, windows = (order->n - 1) / size + 1;
    uint64_t movable[CHUNK], offsets[CHUNK];
    int64_t places[CHUNK], moved = 0;
    uint32_t keys[MAX_ROUNDS];
    core_round_keys(order->seed, 2, epoch * windows + window, sides->rounds, keys);
    core_permute(sides, keys, samples, (size_t)count, 0);
    for (int64_t i = 0; i < count; i++) {
        uint64_t slot = samples[i] / order->block + window * order->window;
        offsets[i] = samples[i] % order->block;
        samples[i] = slot;
        if (slot < order->blocks.n && order->has_blocks) {
            movable[moved] = slot;
            places[moved++] = i;
        }
    }
    core_round_keys(order->seed, 1, epoch, order->blocks.rounds, keys);
    core_permute(&order->blocks, keys, movable, (size_t)moved, 0);
    for (int64_t k = 0; k < moved; k++) samples[places[k]] = movable[k];
    for (int64_t i = 0; i < count; i++) samples[i] = samples[i] * order->block + offsets[i];
}

static void block_shuffled(const Order *order, uint64_t epoch, uint64_t *samples, int64_t count) {
    uint64_t size = order->block * order->window;
    for (int64_t first = 0, last; first < count; first = last) {
        uint64_t window = samples[first] / size;
        for (last = first; last < count && last - first < CHUNK && samples[last] / size == window; last++)
            samples[last] -= window * size;
        const Sides *sides = window == order->n / size ? &order->rest : &order->full;
        block_chunk(order, epoch, window, sides, samples + first, last - first);
    }
}

void core_order(const Order *order, const int64_t *positions, int64_t count, int64_t *out) {
    uint64_t *samples = (uint64_t *)out;
    if (order->kind == MIXTURE) {
        core_mixture(order->mixture, order->seed, positions, count, out);
        return;
    }
    for (int64_t first = 0, last; first < count; first = last) {
        uint64_t epoch = epoch_run(order->n, positions, first, count, samples, &last);
        if (order->kind == SHUFFLED) shuffled(order, epoch, samples + first, last - first);
        else if (order->kind == BLOCK_SHUFFLED) block_shuffled(order, epoch, samples + first, last - first);
    }
}

/* samples(plan, positions, out): the sample at each position, all int64. */
static PyObject *samples_at(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *plan, *given;
    Py_buffer positions_buffer, out;
    Order order;
    if (!PyArg_ParseTuple(args, "O!Ow*", &PyTuple_Type, &plan, &given, &out)) return NULL;
    int64_t count = 0, lowest = 0;
    const int64_t *positions = core_order_init(&order, plan) < 0 ? NULL : core_int64s(given, &positions_buffer, &count);
    if (positions != NULL) {
        int is_fitting = out.len == count * 8 && (uintptr_t)out.buf % 8 == 0;
        for (int64_t i = 0; i < count; i++) lowest = positions[i] < lowest ? positions[i] : lowest;
        if (lowest < 0 || !is_fitting) {
            PyErr_SetString(PyExc_ValueError, "samples: positions from 0 on, and room for as many int64 samples");
        } else {
            Py_BEGIN_ALLOW_THREADS
            core_order(&order, positions, count, out.buf);
            Py_END_ALLOW_THREADS
        }
        PyBuffer_Release(&positions_buffer);
    }
    PyBuffer_Release(&out);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef core_order_functions[] = {
    {"samples", samples_at, METH_VARARGS, "samples(plan, positions, out): the sample at each position of an order."},
    {NULL, NULL, 0, NULL},
};

/* ("sequential", n) | ("shuffled", n, seed) | ("block_shuffled", n, seed, block, window) | ("mixture", n, seed, Mixture) */
int core_order_init(Order *order, PyObject *plan) {
    const char *name;
    unsigned long long n, seed = 0, block = 1, window = 1;
    PyObject *last = PyTuple_Size(plan) == 4 ? PyTuple_GetItem(plan, 3) : NULL;
    if (last != NULL && core_is_mixture(last)) {
        if (!PyArg_ParseTuple(plan, "sKKO", &name, &n, &seed, &last)) return -1;
        *order = (Order){.kind = MIXTURE, .n = n, .seed = seed, .mixture = last};
        return 0;
    }
    if (!PyArg_ParseTuple(plan, "sK|KKK", &name, &n, &seed, &block, &window)) return -1;
    order->kind = !strcmp(name, "sequential") ? SEQUENTIAL : !strcmp(name, "shuffled") ? SHUFFLED : BLOCK_SHUFFLED;
    int is_known = order->kind != BLOCK_SHUFFLED || !strcmp(name, "block_shuffled");
    if (!is_known || n == 0 || n > INT64_MAX || block == 0 || window == 0 || block > INT64_MAX / window) {
        PyErr_Format(PyExc_ValueError, "a plan of an order is %R", plan);
        return -1;
    }
    uint64_t blocks = n / block, rest = n % (block * window);
    *order = (Order){order->kind, blocks > 0, n, seed, block, window, core_sides(n), core_sides(blocks ? blocks : 1),
                     core_sides(block * window), core_sides(rest ? rest : 1), NULL};
    return 0;
}
