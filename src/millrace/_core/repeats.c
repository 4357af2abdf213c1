/* Which of many units repeat an earlier one, by their keys: hashes of 128 bits, which are well mixed already. */
#include "core.h"

#include <stdlib.h>

#define AHEAD 16 /* places that are fetched before they are looked at */

typedef struct {
    uint64_t key[2];
    int64_t number;
} Entry;

/* Places hold the high half of a key's first half, and 1 + the entry that has it and the smallest number; 0 is free. */
static int64_t find(const Entry *entries, int64_t count, uint64_t *places, uint64_t mask, int64_t *numbers) {
    int64_t found = 0;
    for (int64_t k = 0; k < count; k++) {
        const Entry *entry = &entries[k];
        if (k + AHEAD < count) __builtin_prefetch(&places[entries[k + AHEAD].key[0] & mask], 1);
        uint64_t at = entry->key[0] & mask, tag = entry->key[0] >> 32 << 32;
        for (; places[at] != 0; at = (at + 1) & mask) {
            if (places[at] >> 32 << 32 != tag) continue;
            const Entry *first = &entries[(places[at] & UINT32_MAX) - 1];
            if (memcmp(first->key, entry->key, sizeof entry->key) != 0) continue;
            int64_t later = entry->number > first->number ? entry->number : first->number;
            if (later >= 0 && entry->number != first->number) numbers[found++] = later;
            if (entry->number < first->number) places[at] = tag | (uint64_t)(k + 1);
            break;
        }
        if (places[at] == 0) places[at] = tag | (uint64_t)(k + 1);
    }
    return found;
}

static PyObject *repeated(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer entries, numbers;
    if (!PyArg_ParseTuple(args, "y*w*:repeated", &entries, &numbers)) return NULL;
    int64_t count = entries.len / (int64_t)sizeof(Entry), found = -1;
    uint64_t room = 1024, *places = NULL;
    while (room < (uint64_t)count * 2) room *= 2;
    if (entries.len % (Py_ssize_t)sizeof(Entry) != 0 || count >= UINT32_MAX || numbers.len < count * 8)
        PyErr_SetString(PyExc_ValueError, "repeated: entries of 24 bytes, and room for a number of each");
    else if ((places = core_table(room * 8)) == NULL)
        PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        found = find(entries.buf, count, places, room - 1, numbers.buf);
        Py_END_ALLOW_THREADS
    }
    free(places);
    PyBuffer_Release(&entries);
    PyBuffer_Release(&numbers);
    return found < 0 ? NULL : PyLong_FromLongLong(found);
}

/* Keys that were met, as many as there turn out to be: places of 16 bytes, of which zeros are free. */
typedef struct {
    PyObject_HEAD
    uint64_t (*places)[2];
    uint64_t mask, count;
    int has_zero; /* the key that is all zeros */
} Seen;

static int is_free(const uint64_t *place) { return (place[0] | place[1]) == 0; }

static uint64_t place_of(const Seen *seen, const uint64_t *key) {
    uint64_t at = key[0] & seen->mask;
    while (!is_free(seen->places[at]) && memcmp(seen->places[at], key, 16) != 0) at = (at + 1) & seen->mask;
    return at;
}

static int seen_grow(Seen *seen) {
    uint64_t room = seen->places == NULL ? 4096 : (seen->mask + 1) * 4, old_room = seen->places == NULL ? 0 : seen->mask + 1;
    uint64_t (*old)[2] = seen->places, (*places)[2] = calloc(room, 16);
    if (places == NULL) return -1;
    seen->places = places, seen->mask = room - 1;
    for (uint64_t k = 0; k < old_room; k++)
        if (!is_free(old[k])) memcpy(places[place_of(seen, old[k])], old[k], 16);
    free(old);
    return 0;
}

/* Whether a key is new; it is kept. -1 without memory. */
static int seen_key(Seen *seen, const uint64_t *key) {
    if (is_free(key)) return seen->has_zero ? 0 : (seen->has_zero = 1);
    if ((seen->places == NULL || seen->count * 2 > seen->mask) && seen_grow(seen) < 0) return -1;
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
        uint64_t key[2], ahead;
        memcpy(key, (const char *)keys.buf + 16 * k, 16);
        if (k + AHEAD < keys.len / 16 && seen->places != NULL) {
            memcpy(&ahead, (const char *)keys.buf + 16 * (k + AHEAD), 8);
            __builtin_prefetch(seen->places[ahead & seen->mask], 1);
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

static void seen_dealloc(PyObject *object) {
    free(((Seen *)object)->places);
    core_free(object);
}

static PyMethodDef seen_methods[] = {
    {"add", seen_add, METH_O, "Of keys of 16 bytes, one after the other: 1 where one is new, 0 where it was met."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot seen_slots[] = {
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

static PyMethodDef repeats_functions[] = {
    {"repeated", repeated, METH_VARARGS, "(entries, numbers) -> how many numbers it found whose key has a smaller number too."},
    {NULL, NULL, 0, NULL},
};

int core_add_repeats(PyObject *module) {
    return core_add_type(module, &seen_spec, NULL) < 0 ? -1 : PyModule_AddFunctions(module, repeats_functions);
}
