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
    else if ((places = calloc(room, 8)) == NULL)
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

static PyMethodDef repeats_functions[] = {
    {"repeated", repeated, METH_VARARGS, "(entries, numbers) -> how many numbers it found whose key has a smaller number too."},
    {NULL, NULL, 0, NULL},
};

int core_add_repeats(PyObject *module) { return PyModule_AddFunctions(module, repeats_functions); }
