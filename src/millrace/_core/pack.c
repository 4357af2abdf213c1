/* Packs documents into blocks: best fit, the longest first. Twin of `reference_pack` in view/packing.py. And marks the
 * documents of blocks: twin of `mark_numpy` in view/documents.py.
 *
 * Blocks with the same free room lie in a list, the last one changed first. A tree of bits says which rooms have a block, so
 * that the smallest room that is large enough takes a few steps, whatever the number of documents. */
#include "core.h"

#include <stdlib.h>

#define MAX_LENGTH (1 << 24)
#define LEVELS 4 /* 64^4 rooms */
#define NONE UINT32_MAX

typedef struct {
    uint64_t *bits[LEVELS];
    uint32_t *heads, *next; /* the first block of each room; the block after each block */
    uint32_t *firsts, *lasts, *counts; /* of each block: its first and last piece, and how many it has */
    uint32_t num_blocks, capacity;
} Rooms;

static void mark(Rooms *rooms, int64_t room, int is_there) {
    for (int level = 0; level < LEVELS; level++, room >>= 6) {
        uint64_t *word = &rooms->bits[level][room >> 6], bit = (uint64_t)1 << (room & 63);
        uint64_t before = *word;
        *word = is_there ? before | bit : before & ~bit;
        if (is_there ? before != 0 : *word != 0) return; /* the levels above know already */
    }
}

/* The smallest room of at least this that has a block, or -1. */
static int64_t find(const Rooms *rooms, int64_t room) {
    int level = 0;
    uint64_t rest = 0;
    for (; level < LEVELS; level++) {
        rest = rooms->bits[level][room >> 6] & (~(uint64_t)0 << (room & 63));
        if (rest) break;
        room = (room >> 6) + 1; /* a later word, looked for one level up */
    }
    if (level == LEVELS) return -1;
    room = (room & ~(int64_t)63) | __builtin_ctzll(rest);
    for (; level > 0; level--) room = room << 6 | __builtin_ctzll(rooms->bits[level - 1][room]);
    return room;
}

static int grow(Rooms *rooms) {
    uint32_t capacity = rooms->capacity > NONE / 2 ? NONE : rooms->capacity * 2 + 1024;
    uint32_t **arrays[] = {&rooms->next, &rooms->firsts, &rooms->lasts, &rooms->counts};
    for (size_t k = 0; k < sizeof arrays / sizeof *arrays; k++) {
        uint32_t *larger = realloc(*arrays[k], (size_t)capacity * sizeof **arrays[k]);
        if (larger == NULL) return -1;
        *arrays[k] = larger;
    }
    rooms->capacity = capacity;
    return 0;
}

static int rooms_init(Rooms *rooms, int64_t length) {
    size_t words = ((size_t)length >> 6) + 2;
    for (int level = 0; level < LEVELS; level++, words = (words >> 6) + 2)
        if ((rooms->bits[level] = calloc(words, 8)) == NULL) return -1;
    rooms->heads = malloc(((size_t)length + 1) * sizeof *rooms->heads);
    if (rooms->heads == NULL) return -1;
    memset(rooms->heads, 0xFF, ((size_t)length + 1) * sizeof *rooms->heads);
    return 0;
}

static void rooms_free(Rooms *rooms) {
    for (int level = 0; level < LEVELS; level++) free(rooms->bits[level]);
    uint32_t *own[] = {rooms->heads, rooms->next, rooms->firsts, rooms->lasts, rooms->counts};
    for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
}

/* Puts pieces, sorted by falling length, into blocks; chain[k] is the piece after piece k in its block. */
static int pack(Rooms *rooms, const int64_t *ends, int64_t length, uint32_t *chain) {
    uint32_t piece = 0;
    for (int64_t own = length; own > 0; own--)
        for (; piece < ends[own]; piece++) {
            int64_t room = find(rooms, own), left;
            uint32_t block;
            chain[piece] = NONE;
            if (room < 0) {
                if (rooms->num_blocks == rooms->capacity && grow(rooms) < 0) return -1;
                block = rooms->num_blocks++;
                rooms->firsts[block] = rooms->lasts[block] = piece;
                rooms->counts[block] = 1;
                left = length - own;
            } else {
                block = rooms->heads[room];
                rooms->heads[room] = rooms->next[block];
                if (rooms->heads[room] == NONE) mark(rooms, room, 0);
                chain[rooms->lasts[block]] = piece;
                rooms->lasts[block] = piece;
                rooms->counts[block]++;
                left = room - own;
            }
            if (left > 0) {
                rooms->next[block] = rooms->heads[left];
                if (rooms->heads[left] == NONE) mark(rooms, left, 1);
                rooms->heads[left] = block;
            }
        }
    return 0;
}

/* Documents with a rest, by falling length of it, then by number; ends[r]: after those with a rest of r. -1: offsets fall, or
 * are negative. */
static int64_t sort_rests(const int64_t *offsets, int64_t count, int64_t length, int64_t *ends, uint32_t *sorted) {
    int64_t at = 0;
    if (sorted == NULL) {
        for (int64_t k = 0; k < count; k++) {
            if (offsets[k] < 0 || offsets[k + 1] < offsets[k]) return -1;
            ends[(offsets[k + 1] - offsets[k]) % length]++;
        }
        for (int64_t own = length - 1; own > 0; own--) {
            int64_t here = ends[own];
            ends[own] = at;
            at += here;
        }
        ends[0] = ends[length] = 0;
        return at;
    }
    for (int64_t k = 0; k < count; k++) {
        int64_t own = (offsets[k + 1] - offsets[k]) % length;
        if (own) sorted[ends[own]++] = (uint32_t)k;
    }
    return 0;
}

/* pack(offsets, length): (documents, offsets of blocks) as bytes of uint32 and int64. Only the rest of a document that does
 * not fill whole blocks is packed. */
static PyObject *pack_documents(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *documents = NULL, *blocks = NULL, *found = NULL;
    Py_buffer buffer;
    long long length;
    int64_t count, num_pieces = 0;
    if (!PyArg_ParseTuple(args, "OL", &given, &length)) return NULL;
    const int64_t *offsets = core_int64s(given, &buffer, &count);
    if (offsets == NULL) return NULL;
    Rooms rooms = {0};
    int64_t *ends = NULL;
    uint32_t *sorted = NULL, *chain = NULL;
    int is_fine = count > 0 && count - 1 < (int64_t)NONE && length > 0 && length <= MAX_LENGTH, status = -1;
    if (is_fine && (ends = calloc((size_t)length + 1, sizeof *ends)) != NULL) {
        Py_BEGIN_ALLOW_THREADS
        num_pieces = sort_rests(offsets, count - 1, length, ends, NULL);
        Py_END_ALLOW_THREADS
        is_fine = num_pieces >= 0;
    }
    if (is_fine && ends != NULL) {
        sorted = malloc((size_t)num_pieces * sizeof *sorted + 1);
        chain = malloc((size_t)num_pieces * sizeof *chain + 1);
        if (sorted != NULL && chain != NULL && rooms_init(&rooms, length) == 0) {
            Py_BEGIN_ALLOW_THREADS
            sort_rests(offsets, count - 1, length, ends, sorted);
            status = pack(&rooms, ends, length, chain);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&buffer);
    if (!is_fine) PyErr_SetString(PyExc_ValueError, "pack: offsets that never fall, and a length of 1 to 2^24");
    else if (status) PyErr_NoMemory();
    else {
        documents = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)num_pieces * 4);
        blocks = PyBytes_FromStringAndSize(NULL, ((Py_ssize_t)rooms.num_blocks + 1) * 8);
    }
    if (documents != NULL && blocks != NULL) {
        char *to = PyBytes_AsString(documents), *edges = PyBytes_AsString(blocks);
        int64_t at = 0;
        for (uint32_t block = 0; block < rooms.num_blocks; block++) {
            memcpy(edges + (size_t)block * 8, &at, 8);
            for (uint32_t piece = rooms.firsts[block]; piece != NONE; piece = chain[piece])
                memcpy(to + (size_t)at++ * 4, &sorted[piece], 4);
        }
        memcpy(edges + (size_t)rooms.num_blocks * 8, &at, 8);
        found = PyTuple_Pack(2, documents, blocks);
    }
    Py_XDECREF(documents);
    Py_XDECREF(blocks);
    rooms_free(&rooms);
    free(ends);
    free(sorted);
    free(chain);
    return found;
}

typedef struct {
    int32_t *document;
    int64_t *place;
    char *mask;
} Marks;

/* Marks one block, whose pieces lie one after the other from its begin; the rest is padding. -1: they do not fit. */
static int mark_block(Marks to, int64_t length, int64_t count, const int64_t *lengths, const int64_t *places, const char *is_last) {
    int64_t at = 0;
    for (int64_t p = 0; p < count; at += lengths[p++]) {
        int64_t own = lengths[p];
        if (own < 1 || own > length - at) return -1;
        for (int64_t k = 0; k < own; k++) to.document[at + k] = (int32_t)p;
        for (int64_t k = 0; k < own; k++) to.place[at + k] = (int64_t)((uint64_t)places[p] + (uint64_t)k);
        memset(to.mask + at, 1, (size_t)own);
        if (is_last[p]) to.mask[at + own - 1] = 0;
    }
    for (int64_t k = at; k < length; k++) to.document[k] = -1;
    memset(to.place + at, 0, (size_t)(length - at) * sizeof *to.place);
    memset(to.mask + at, 0, (size_t)(length - at));
    return 0;
}

static PyObject *mark_documents(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given[3];
    Py_buffer held[3], is_last, document, place, mask;
    const int64_t *numbers[3];
    int64_t sizes[3];
    int num_held = 0, status = -1;
    long long length;
    if (!PyArg_ParseTuple(args, "OOOy*Lw*w*w*:mark_documents", &given[0], &given[1], &given[2], &is_last, &length, &document,
                          &place, &mask))
        return NULL;
    while (num_held < 3 && (numbers[num_held] = core_int64s(given[num_held], &held[num_held], &sizes[num_held])) != NULL) num_held++;
    int is_fit = num_held == 3 && length > 0 && length <= MAX_LENGTH && sizes[1] == sizes[2] && is_last.len == sizes[1] &&
                 mask.len % length == 0 && mask.len / length == sizes[0] && document.len == 4 * mask.len &&
                 place.len == 8 * mask.len && core_is_aligned(&document, 4) && core_is_aligned(&place, 8);
    if (is_fit) {
        Py_BEGIN_ALLOW_THREADS
        int64_t first = 0;
        status = 0;
        for (int64_t block = 0; block < sizes[0] && !status; first += numbers[0][block++]) {
            int64_t at = block * length, count = numbers[0][block];
            Marks to = {(int32_t *)document.buf + at, (int64_t *)place.buf + at, (char *)mask.buf + at};
            status = count < 0 || count > sizes[1] - first
                         ? -1
                         : mark_block(to, length, count, numbers[1] + first, numbers[2] + first, (const char *)is_last.buf + first);
        }
        Py_END_ALLOW_THREADS
    }
    if (status && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "mark_documents: the pieces do not fit their blocks");
    Py_buffer *all[] = {&is_last, &document, &place, &mask};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) PyBuffer_Release(all[k]);
    while (num_held) PyBuffer_Release(&held[--num_held]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyMethodDef core_pack_functions[] = {
    {"mark_documents", mark_documents, METH_VARARGS, "(counts, lengths, places, is_last, length, document, place, mask): writes the marks of blocks."},
    {"pack", pack_documents, METH_VARARGS, "pack(offsets, length): documents by block, and where each block begins."},
    {NULL, NULL, 0, NULL},
};
