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
