/* Which of many units repeat an earlier one, by their keys: hashes of 128 bits, which are well mixed already. */
#include "core.h"

#include <stdlib.h>

#define AHEAD 16 /* places that are fetched before they are looked at */

/* Keys that were met, as many as there turn out to be: places of 16 bytes, of which zeros are free. */
typedef struct {
    PyObject_HEAD
    uint64_t (*places)[2];
    uint64_t mask, count;
    int has_zero; /* the key that is all zeros */
} Seen;

static int is_free(const uint64_t *place) { return (place[0] | place[1]) == 0; }

static uint64_t first_place(const Seen *seen, const uint64_t *key) { return (key[0] ^ key[1]) & seen->mask; }

static uint64_t place_of(const Seen *seen, const uint64_t *key) {
    uint64_t at = first_place(seen, key);
    while (!is_free(seen->places[at]) && memcmp(seen->places[at], key, 16) != 0) at = (at + 1) & seen->mask;
    return at;
}

/* To so many places, a power of two. */
static int seen_grow(Seen *seen, uint64_t room) {
    uint64_t old_room = seen->places == NULL ? 0 : seen->mask + 1;
    uint64_t (*old)[2] = seen->places, (*places)[2] = core_table(room * 16);
    if (places == NULL) return -1;
    seen->places = places, seen->mask = room - 1;
    for (uint64_t k = 0; k < old_room; k++)
        if (!is_free(old[k])) memcpy(places[place_of(seen, old[k])], old[k], 16);
    free(old);
    return 0;
}

static int is_full(uint64_t room, uint64_t count) { return count > room / 4 * 3; }

/* Whether a key is new; it is kept. -1 without memory. */
static int seen_key(Seen *seen, const uint64_t *key) {
    if (is_free(key)) return seen->has_zero ? 0 : (seen->has_zero = 1);
    if (is_full(seen->mask + 1, seen->count) && seen_grow(seen, (seen->mask + 1) * 4) < 0) return -1;
    uint64_t at = place_of(seen, key);
    if (!is_free(seen->places[at])) return 0;
    memcpy(seen->places[at], key, 16);
    seen->count++;
    return 1;
}

static PyObject *seen_add(PyObject *object, PyObject *given) {
    Seen *seen = (Seen *)object;
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
            __builtin_prefetch(seen->places[first_place(seen, ahead)], 1);
        }
        int status = seen_key(seen, key);
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

static PyObject *seen_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    (void)options;
    unsigned long long count = 0;
    uint64_t room = 4096;
    if (!PyArg_ParseTuple(args, "|K:Seen", &count)) return NULL;
    while (room < UINT64_MAX / 64 && is_full(room, count)) room *= 2;
    Seen *seen = (Seen *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (seen != NULL && seen_grow(seen, room) < 0) {
        Py_CLEAR(seen);
        PyErr_NoMemory();
    }
    return (PyObject *)seen;
}

static void seen_dealloc(PyObject *object) {
    free(((Seen *)object)->places);
    core_free(object);
}

static PyMethodDef seen_methods[] = {
    {"add", seen_add, METH_O, "Of keys of 16 bytes, one after the other: 1 where one is new, 0 where it was met."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot seen_slots[] = {
    {Py_tp_new, (void *)seen_new},
    {Py_tp_dealloc, (void *)seen_dealloc},
    {Py_tp_methods, seen_methods},
    {0, NULL},
};

static PyType_Spec seen_spec = {
    .name = "millrace._core.Seen",
    .basicsize = sizeof(Seen),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = seen_slots,
};

int core_add_repeats(PyObject *module) { return core_add_type(module, &seen_spec, NULL); }
