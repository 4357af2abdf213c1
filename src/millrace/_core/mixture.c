/* Mixture: whose turn it is at each position, and the shuffle of each source. Twin of order/mixture.py. */
#include "core.h"

#include <stdlib.h>

#define PERIOD 65536
#define LANE 16

typedef struct {
    PyObject_HEAD
    int64_t num_sources, num_segments, num_tables;
    int64_t *ends, *starts, *which, *bases; /* of sources; of segments: first position, table, samples of each source before */
    int64_t *turns, *ranks;                 /* of each place of each table: whose turn, and how often it had one before */
    int64_t *counts;                        /* of each table: turns of each source in a period */
    Sides *sides;                           /* of each source */
} Mixture;

static PyTypeObject *Mixture_Type;

int core_is_mixture(PyObject *object) { return PyObject_TypeCheck(object, Mixture_Type); }

/* The source at a position, and how many of its samples came before. Unsigned: a wrong position leads to a wrong sample, never
 * outside of the tables. */
static int64_t turn(const Mixture *self, int64_t position, uint64_t *ordinal) {
    int64_t low = 0, high = self->num_segments - 1;
    while (low < high) { /* the last segment that has begun */
        int64_t middle = (low + high + 1) / 2;
        if (self->starts[middle] <= position) low = middle;
        else high = middle - 1;
    }
    uint64_t since = (uint64_t)position - (uint64_t)self->starts[low];
    int64_t table = self->which[low], place = table * PERIOD + (int64_t)(since % PERIOD), source = self->turns[place];
    *ordinal = (uint64_t)self->bases[low * self->num_sources + source] + (uint64_t)self->ranks[place] +
               since / PERIOD * (uint64_t)self->counts[table * self->num_sources + source];
    return source;
}

#define KNOWN 64 /* keys of a source and its pass, made once for the samples that share them */

typedef struct {
    int64_t source;
    uint64_t epoch;
    uint32_t keys[MAX_ROUNDS];
} Known;

void core_mixture(const PyObject *object, uint64_t seed, const int64_t *positions, int64_t count, int64_t *samples) {
    const Mixture *self = (const Mixture *)object;
    const Sides *sides[EACH];
    uint32_t keys[MAX_ROUNDS][EACH];
    uint64_t inside[EACH];
    int64_t firsts[EACH];
    int places[EACH];
    Known known[KNOWN];
    for (int k = 0; k < KNOWN; k++) known[k].source = -1;
    for (int64_t begin = 0; begin < count; begin += EACH) {
        int size = (int)(count - begin < EACH ? count - begin : EACH), front = 0, back = size;
        for (int k = 0; k < size; k++) {
            uint64_t ordinal;
            int64_t source = turn(self, positions[begin + k], &ordinal);
            const Sides *own = &self->sides[source];
            uint64_t epoch = ordinal < own->n ? 0 : ordinal / own->n;
            int at = own->rounds == MAX_ROUNDS ? front++ : --back; /* those of most rounds first */
            Known *made = &known[source % KNOWN];
            if (made->source != source || made->epoch != epoch) {
                made->source = source;
                made->epoch = epoch;
                core_round_keys(seed, (uint64_t)(LANE + source), epoch, own->rounds, made->keys);
            }
            for (int r = 0; r < own->rounds; r++) keys[r][at] = made->keys[r];
            sides[at] = own;
            inside[at] = ordinal - epoch * own->n;
            firsts[at] = source ? self->ends[source - 1] : 0;
            places[at] = k;
        }
        core_permute_each(sides, keys, inside, size);
        for (int at = 0; at < size; at++) samples[begin + places[at]] = firsts[at] + (int64_t)inside[at];
    }
}

typedef struct {
    int64_t last, source; /* the last step at which the next turn of a source may come */
} Turn;

typedef struct {
    const int64_t *parts;
    int64_t num_sources, unit, size;
    int64_t *done, *begins, *after; /* turns so far; the first source whose turn may come from a step on; the one after it */
    Turn *heap;                     /* whose turn may come, the one that must come first in front */
} Turns;

static int is_before(Turn one, Turn other) { return one.last != other.last ? one.last < other.last : one.source < other.source; }

static void push(Turns *self, Turn own) {
    int64_t at = self->size++;
    for (; at > 0 && is_before(own, self->heap[(at - 1) / 2]); at = (at - 1) / 2) self->heap[at] = self->heap[(at - 1) / 2];
    self->heap[at] = own;
}

static int64_t pop(Turns *self) {
    int64_t source = self->heap[0].source, at = 0, child;
    Turn own = self->heap[--self->size];
    while ((child = 2 * at + 1) < self->size) {
        if (child + 1 < self->size && is_before(self->heap[child + 1], self->heap[child])) child++;
        if (!is_before(self->heap[child], own)) break;
        self->heap[at] = self->heap[child];
        at = child;
    }
    self->heap[at] = own;
    return source;
}

/* Notes the next turn of a source, which had its last before this step. */
static void release(Turns *self, int64_t source, int64_t step) {
    int64_t share = self->parts[source] * self->unit;
    int64_t at = (PERIOD * (self->done[source] * self->unit + 1) + share - 1) / share;
    at = at < step ? step : at;
    at = at < PERIOD ? at : PERIOD;
    self->after[source] = self->begins[at];
    self->begins[at] = source;
}

static int make_turns(Turns *self, int64_t *turns) {
    for (int64_t step = 0; step <= PERIOD; step++) self->begins[step] = -1;
    for (int64_t k = 0; k < self->num_sources; k++)
        if (self->parts[k]) release(self, k, 1);
    for (int64_t step = 1; step <= PERIOD; step++) {
        for (int64_t k = self->begins[step]; k >= 0; k = self->after[k]) {
            int64_t until = PERIOD * (self->done[k] * self->unit + self->unit - 1);
            push(self, (Turn){until / (self->parts[k] * self->unit) + 1, k});
        }
        if (self->size == 0) return -1;
        int64_t source = turns[step - 1] = pop(self);
        if (++self->done[source] < self->parts[source]) release(self, source, step + 1);
    }
    return 0;
}

/* turns(parts): whose turn it is at each place of a period, as bytes of int64. Twin of `reference_turns`. */
static PyObject *mixture_turns(PyObject *module, PyObject *given) {
    (void)module;
    Turns self = {0};
    PyObject *found = NULL;
    int64_t sum = 0, num_mixed = 0, status = -1;
    int64_t *parts = core_copied_int64s(given, &self.num_sources), *turns = NULL;
    if (parts == NULL) return NULL;
    for (int64_t k = 0; k < self.num_sources && sum >= 0 && sum <= PERIOD; k++) {
        sum = parts[k] < 0 || parts[k] > PERIOD ? -1 : sum + parts[k];
        num_mixed += parts[k] > 0;
    }
    self.parts = parts;
    self.unit = num_mixed > 1 ? 2 * (num_mixed - 1) : 1;
    self.done = calloc((size_t)self.num_sources + 1, sizeof *self.done);
    self.after = calloc((size_t)self.num_sources + 1, sizeof *self.after);
    self.begins = calloc(PERIOD + 1, sizeof *self.begins);
    self.heap = calloc((size_t)num_mixed + 1, sizeof *self.heap);
    turns = malloc(PERIOD * sizeof *turns);
    if (self.done == NULL || self.after == NULL || self.begins == NULL || self.heap == NULL || turns == NULL) PyErr_NoMemory();
    else if (sum == PERIOD) {
        Py_BEGIN_ALLOW_THREADS
        status = make_turns(&self, turns);
        Py_END_ALLOW_THREADS
    }
    if (status && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "turns: parts of 65,536 in all");
    if (!status) found = PyBytes_FromStringAndSize((const char *)turns, PERIOD * (Py_ssize_t)sizeof *turns);
    void *own[] = {parts, self.done, self.after, self.begins, self.heap, turns};
    for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
    return found;
}

PyMethodDef core_mixture_functions[] = {
    {"turns", mixture_turns, METH_O, "turns(parts): the source at each place of a period, as bytes of int64."},
    {NULL, NULL, 0, NULL},
};

/* Counts turns; -1 where a number leads nowhere. */
static int mixture_init(Mixture *self) {
    for (int64_t k = 0; k < self->num_sources; k++) {
        int64_t first = k ? self->ends[k - 1] : 0; /* compared before they are subtracted, which might overflow */
        if (self->ends[k] <= first) return -1;
        self->sides[k] = core_sides((uint64_t)(self->ends[k] - first));
    }
    for (int64_t place = 0; place < self->num_tables * PERIOD; place++) {
        if (self->turns[place] < 0 || self->turns[place] >= self->num_sources) return -1;
        int64_t *own = &self->counts[place / PERIOD * self->num_sources + self->turns[place]];
        self->ranks[place] = (*own)++;
    }
    for (int64_t k = 0; k < self->num_segments; k++) {
        if (self->which[k] < 0 || self->which[k] >= self->num_tables) return -1;
        if (k ? self->starts[k] <= self->starts[k - 1] : self->starts[k]) return -1;
        for (int64_t s = 0; s < self->num_sources; s++) {
            int64_t base = self->bases[k * self->num_sources + s];
            if (base < 0 || base > self->starts[k]) return -1; /* so that ordinals stay below positions */
        }
    }
    return 0;
}

/* Mixture(ends, starts, which, bases, turns), all int64. */
static PyObject *mixture_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *ends, *starts, *which, *bases, *turns;
    if (kwargs != NULL && PyDict_Size(kwargs)) return PyErr_Format(PyExc_TypeError, "Mixture takes no keywords");
    if (!PyArg_ParseTuple(args, "OOOOO", &ends, &starts, &which, &bases, &turns)) return NULL;
    Mixture *self = (Mixture *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    int64_t num_which = 0, num_bases = 0, num_turns = 0;
    if ((self->ends = core_copied_int64s(ends, &self->num_sources)) != NULL &&
        (self->starts = core_copied_int64s(starts, &self->num_segments)) != NULL &&
        (self->which = core_copied_int64s(which, &num_which)) != NULL &&
        (self->bases = core_copied_int64s(bases, &num_bases)) != NULL)
        self->turns = core_copied_int64s(turns, &num_turns);
    int is_fine = self->turns != NULL && self->num_sources > 0 && self->num_segments > 0 && num_which == self->num_segments;
    is_fine = is_fine && num_turns > 0 && num_turns % PERIOD == 0;
    /* Divided, so that no product is too large. */
    is_fine = is_fine && num_bases % self->num_sources == 0 && num_bases / self->num_sources == self->num_segments;
    if (is_fine) {
        self->num_tables = num_turns / PERIOD;
        self->ranks = calloc((size_t)num_turns, sizeof *self->ranks);
        self->counts = calloc((size_t)self->num_tables * (size_t)self->num_sources, sizeof *self->counts);
        self->sides = calloc((size_t)self->num_sources, sizeof *self->sides);
        if (self->ranks == NULL || self->counts == NULL || self->sides == NULL) PyErr_NoMemory();
        else is_fine = mixture_init(self) == 0;
    }
    if (!is_fine && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the numbers of a mixture do not fit together");
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void mixture_dealloc(PyObject *object) {
    Mixture *self = (Mixture *)object;
    int64_t *own[] = {self->ends, self->starts, self->which, self->bases, self->turns, self->ranks, self->counts};
    for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
    free(self->sides);
    core_free(object);
}

static PyType_Slot mixture_slots[] = {
    {Py_tp_doc, "Mixture(ends, starts, which, bases, turns): the turns of sources, for the plan of an order."},
    {Py_tp_new, (void *)mixture_new},
    {Py_tp_dealloc, (void *)mixture_dealloc},
    {0, NULL},
};

int core_add_mixture(PyObject *module) { return core_add_type(module, "millrace._core.Mixture", sizeof(Mixture), mixture_slots, &Mixture_Type); }
