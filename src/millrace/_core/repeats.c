/* A set of hashes of 128 bits, which are well mixed already: finds units that repeat earlier ones. */
#include "core.h"

#include <stdlib.h>

#define AHEAD 16 /* places that are fetched early */

/* Places of 16 bytes, as many as needed; one of zeros is free. */
typedef struct {
    PyObject_HEAD
    uint64_t (*places)[2];
    uint64_t mask, count;
    int has_zero; /* the key that is all zeros */
} KnownHashes;

static int is_free(const uint64_t *place) { return (place[0] | place[1]) == 0; }

static uint64_t first_place(const KnownHashes *known, const uint64_t *key) { return (key[0] ^ key[1]) & known->mask; }

static uint64_t place_of(const KnownHashes *known, const uint64_t *key) {
    uint64_t at = first_place(known, key);
    while (!is_free(known->places[at]) && memcmp(known->places[at], key, 16) != 0) at = (at + 1) & known->mask;
    return at;
}

/* Grows to so many places, a power of two. */
static int known_grow(KnownHashes *known, uint64_t room) {
    uint64_t old_room = known->places == NULL ? 0 : known->mask + 1;
    uint64_t (*old)[2] = known->places, (*places)[2] = core_table(room * 16);
    if (places == NULL) return -1;
    known->places = places, known->mask = room - 1;
    for (uint64_t k = 0; k < old_room; k++)
        if (!is_free(old[k])) memcpy(places[place_of(known, old[k])], old[k], 16);
    free(old);
    return 0;
}

static int is_full(uint64_t room, uint64_t count) { return count > room / 4 * 3; }

/* Adds a key; whether it is new, or -1 without memory. */
static int known_key(KnownHashes *known, const uint64_t *key) {
    if (is_free(key)) return known->has_zero ? 0 : (known->has_zero = 1);
    if (is_full(known->mask + 1, known->count) && known_grow(known, (known->mask + 1) * 4) < 0) return -1;
    uint64_t at = place_of(known, key);
    if (!is_free(known->places[at])) return 0;
    memcpy(known->places[at], key, 16);
    known->count++;
    return 1;
}

static PyObject *known_add(PyObject *object, PyObject *given) {
    KnownHashes *known = (KnownHashes *)object;
    Py_buffer keys;
    if (PyObject_GetBuffer(given, &keys, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *found = NULL;
    if (keys.len % 16 != 0) PyErr_SetString(PyExc_ValueError, "add: keys of 16 bytes");
    else found = PyBytes_FromStringAndSize(NULL, keys.len / 16);
    char *is_new = found == NULL ? NULL : PyBytes_AsString(found);
    for (Py_ssize_t k = 0; is_new != NULL && k < keys.len / 16; k++) {
        uint64_t key[2], ahead[2];
        memcpy(key, (const char *)keys.buf + 16 * k, 16);
        if (k + AHEAD < keys.len / 16) {
            memcpy(ahead, (const char *)keys.buf + 16 * (k + AHEAD), 16);
            __builtin_prefetch(known->places[first_place(known, ahead)], 1);
        }
        int status = known_key(known, key);
        if (status < 0) {
            Py_CLEAR(found);
            PyErr_NoMemory();
            break;
        }
        is_new[k] = (char)status;
    }
    PyBuffer_Release(&keys);
    return found;
}

static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    (void)options;
    unsigned long long count = 0;
    uint64_t room = 4096;
    if (!PyArg_ParseTuple(args, "|K:KnownHashes", &count)) return NULL;
    while (room < UINT64_MAX / 64 && is_full(room, count)) room *= 2;
    KnownHashes *known = (KnownHashes *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (known != NULL && known_grow(known, room) < 0) {
        Py_CLEAR(known);
        PyErr_NoMemory();
    }
    return (PyObject *)known;
}

static void known_dealloc(PyObject *object) {
    free(((KnownHashes *)object)->places);
    core_free(object);
}

static PyMethodDef known_methods[] = {
    {"add", known_add, METH_O, "For each key of 16 bytes, 1 if it is new and 0 if it was added before."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot known_slots[] = {
    {Py_tp_new, (void *)known_new},
    {Py_tp_dealloc, (void *)known_dealloc},
    {Py_tp_methods, known_methods},
    {0, NULL},
};

int core_add_repeats(PyObject *module) { return core_add_type(module, "millrace._core.KnownHashes", sizeof(KnownHashes), known_slots, NULL); }
