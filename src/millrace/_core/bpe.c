/* Byte-level BPE of documents, split into words by GPT-2's pattern.

   A cache of fixed size holds words with their ids, each at the place of its hash, where a newer one replaces it. A word
   that is not there is merged from its bytes. A document with a character of unknown kind, or with a long word, is left
   to another encoder. */
#include "core.h"

#include <stdlib.h>

#define MAX_WORD 4096  /* bytes: the time to merge a word grows with the square of its length */
#define MAX_KEY 128   /* bytes of a word in a cache */
#define MAX_ID (1 << 21)
#define PAD MAX_KEY /* bytes after a text that may be read */

typedef struct { /* words of up to so many bytes */
    char *places;
    int shift; /* of a hash: all bytes of a word count in its highest bits */
} WordCache;

typedef struct {
    PyObject_HEAD
    uint64_t *merges; /* left, right and 1 + rank in one number, at the place of their hash */
    uint64_t merge_mask;
    uint64_t *some; /* a bit for the hash of each pair that merges: most do not, and 64 KiB are nearer than a MiB of merges */
    uint32_t *made, *pairs;   /* the id each merge makes; the ranks of the merges of two bytes */
    uint32_t bytes[256], end; /* ids of single bytes, and of the end of a document */
    int width;                /* bytes of an id */
    WordCache caches[3]; /* words of up to 8, 32 and MAX_KEY bytes */
    unsigned char *kinds; /* of characters; NULL until they are given */
    int64_t room;
    unsigned char *text; /* the current document, padded by newlines */
    uint64_t *starts;    /* a bit for each of its bytes: where words begin */
} Bpe;

static uint64_t mixed(uint64_t value) {
    value *= 0x9E3779B97F4A7C15u;
    return value ^ (value >> 32);
}

static uint64_t *merge_of(const Bpe *bpe, uint64_t pair, uint64_t hash) {
    uint64_t at = hash & bpe->merge_mask;
    while (bpe->merges[at] >> 22 != pair && bpe->merges[at] != 0) at = (at + 1) & bpe->merge_mask;
    return &bpe->merges[at];
}

static uint64_t bit_of(uint64_t hash) { return (uint64_t)1 << (hash & 63); }

static uint64_t *word_of(const Bpe *bpe, uint64_t hash) { return &bpe->some[hash >> 6 & (bpe->merge_mask >> 4)]; }

/* UINT32_MAX where two ids do not merge. */
static uint32_t rank_of(const Bpe *bpe, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 21 | right, hash = mixed(pair) >> 4;
    return *word_of(bpe, hash) & bit_of(hash) ? (uint32_t)(*merge_of(bpe, pair, hash) & 0x3FFFFF) - 1 : UINT32_MAX;
}

/* The ids of a word by merges: the lowest rank first, the leftmost of equals. */
static int merged(const Bpe *bpe, const unsigned char *word, int size, uint32_t *ids) {
    uint32_t ranks[MAX_WORD]; /* of the merge of each with the next */
    for (int k = 0; k < size; k++) ids[k] = bpe->bytes[word[k]];
    for (int k = 0; k + 1 < size; k++) ranks[k] = bpe->pairs[word[k] << 8 | word[k + 1]];
    for (;;) {
        int best = 0;
        uint32_t rank = UINT32_MAX;
        for (int k = 0; k + 1 < size; k++)
            if (ranks[k] < rank) rank = ranks[best = k];
        if (rank == UINT32_MAX) return size;
        ids[best] = bpe->made[rank];
        size--;
        for (int k = best + 1; k < size; k++) ids[k] = ids[k + 1];
        for (int k = best + 1; k + 1 < size; k++) ranks[k] = ranks[k + 1];
        if (best > 0) ranks[best - 1] = rank_of(bpe, ids[best - 1], ids[best]);
        if (best + 1 < size) ranks[best] = rank_of(bpe, ids[best], ids[best + 1]);
    }
}

static int put_new(const Bpe *bpe, const unsigned char *word, int64_t size, char *to) {
    uint32_t ids[MAX_WORD];
    int count = merged(bpe, word, (int)size, ids);
    for (int k = 0; k < count; k++) memcpy(to + k * bpe->width, &ids[k], (size_t)bpe->width); /* little-endian */
    return count * bpe->width;
}

/* The ids of a word of at most ``key_bytes``, from its place in the cache or made new. A place holds the bytes of the word
   with zeros after them, its size, the bytes of its ids, and the ids. A word with too many ids is made new every time. */
static inline char *put_cached(const Bpe *bpe, const WordCache *cache, int key_bytes, const unsigned char *word, int64_t size, char *to) {
    uint64_t key[MAX_KEY / 8], hash = (uint64_t)size;
    for (int k = 0; k < key_bytes / 8; k++) {
        int64_t left = size - 8 * k;
        memcpy(&key[k], word + 8 * k, 8);
        if (key_bytes == 8) key[k] &= UINT64_MAX >> (64 - 8 * left);
        else key[k] = left >= 8 ? key[k] : left <= 0 ? 0 : key[k] & UINT64_MAX >> (64 - 8 * left);
        hash = mixed(hash + key[k]);
    }
    char *place = cache->places + (hash >> cache->shift) * (uint64_t)(4 * key_bytes), *ids = place + key_bytes + 4;
    uint16_t sizes[2];
    memcpy(sizes, place + key_bytes, 4);
    if (sizes[0] == size && memcmp(place, key, (size_t)key_bytes) == 0) {
        memcpy(to, ids, (size_t)(3 * key_bytes - 4));
        return to + sizes[1];
    }
    int count = put_new(bpe, word, size, to);
    if (count <= 3 * key_bytes - 4) {
        sizes[0] = (uint16_t)size, sizes[1] = (uint16_t)count;
        memcpy(place, key, (size_t)key_bytes);
        memcpy(place + key_bytes, sizes, 4);
        memcpy(ids, to, (size_t)count);
    }
    return to + count;
}

static char *put_long(const Bpe *bpe, const unsigned char *word, int64_t size, char *to) {
    if (size <= 32) return put_cached(bpe, &bpe->caches[1], 32, word, size, to);
    if (size <= MAX_KEY) return put_cached(bpe, &bpe->caches[2], MAX_KEY, word, size, to);
    return size > MAX_WORD ? NULL : to + put_new(bpe, word, size, to);
}

static inline char *put_word(const Bpe *bpe, const unsigned char *word, int64_t size, char *to) {
    return size <= 8 ? put_cached(bpe, &bpe->caches[0], 8, word, size, to) : put_long(bpe, word, size, to);
}

/* Writes the ids of the current document; returns where they end, or NULL if it is left to another encoder. */
static char *put_words(const Bpe *bpe, int64_t size, char *to) {
    const unsigned char *text = bpe->text;
    int64_t num_blocks = (size + 63) / 64, begun = 0;
    for (int64_t k = 0; k < num_blocks; k++) {
        uint64_t left = bpe->starts[k];
        while (left != 0) {
            int64_t at = 64 * k + __builtin_ctzll(left), length = at - begun;
            left &= left - 1;
            if (length > 0 && (to = put_word(bpe, text + begun, length, to)) == NULL) return NULL;
            begun = at;
            int more = text[at] == '\'' ? core_contraction(text + at) : 0;
            if (more) { /* the next word begins after it, and none before */
                for (int64_t j = at + 1; j < at + more; j++) bpe->starts[j / 64] &= ~((uint64_t)1 << j % 64);
                core_begin(bpe->starts, at + more);
                left = bpe->starts[k] & (UINT64_MAX << at % 64 << 1);
            }
        }
    }
    return begun < size ? put_word(bpe, text + begun, size - begun, to) : to;
}

static int reserve(Bpe *bpe, int64_t size) {
    if (size <= bpe->room) return 0;
    int64_t room = size + size / 2 + 4096;
    free(bpe->text);
    free(bpe->starts);
    bpe->text = malloc((size_t)(room + PAD)), bpe->starts = malloc((size_t)(room / 64 + 2) * 8);
    bpe->room = bpe->text == NULL || bpe->starts == NULL ? 0 : room;
    return bpe->room ? 0 : -1;
}

/* Where the ids of a document end that begin at ``to``, or NULL. */
static char *encoded(Bpe *bpe, const char *text, int64_t size, char *to) {
    if (size == 0) return to;
    memcpy(bpe->text, text, (size_t)size);
    memset(bpe->text + size, '\n', PAD); /* so that white space at the end is one word */
    return core_mark(bpe->text, size, bpe->kinds, bpe->starts) < 0 ? NULL : put_words(bpe, size, to);
}

static PyObject *bpe_encode(PyObject *object, PyObject *args) {
    Bpe *bpe = (Bpe *)object;
    PyObject *given, *found = NULL;
    Documents documents;
    Py_buffer out, counts;
    if (!PyArg_ParseTuple(args, "Ow*w*:encode", &given, &out, &counts)) return NULL;
    if (core_documents_init(&documents, given) < 0) goto free;
    int64_t *lengths = counts.buf, width = bpe->width, size;
    const char *text;
    char *to = out.buf, *last = to + out.len - 3 * MAX_KEY;
    if (!core_is_aligned(&counts, 8)) goto done;
    if (counts.len != documents.count * 8)
        PyErr_SetString(PyExc_ValueError, "encode: counts are int64, one for each document");
    else if (reserve(bpe, documents.longest) < 0) PyErr_NoMemory();
    for (int64_t k = 0; k < documents.count && !PyErr_Occurred(); k++) {
        core_document(&documents, k, &text, &size);
        if (last - to < (size + 1) * width) {
            found = PyLong_FromLong(-1); /* no room for as many ids as there may be */
            break;
        }
        char *end = encoded(bpe, text, size, to);
        lengths[k] = end == NULL ? -1 : (end - to) / width + 1;
        if (end == NULL) continue;
        memcpy(end, &bpe->end, (size_t)width);
        to = end + width;
    }
    if (!PyErr_Occurred() && found == NULL) found = PyLong_FromLongLong((to - (char *)out.buf) / width);
done:
    core_documents_free(&documents);
free:
    PyBuffer_Release(&out);
    PyBuffer_Release(&counts);
    return found;
}

static PyObject *bpe_learn(PyObject *object, PyObject *given) {
    Bpe *bpe = (Bpe *)object;
    Py_buffer kinds;
    if (PyObject_GetBuffer(given, &kinds, PyBUF_SIMPLE) < 0) return NULL;
    if (kinds.len != NUM_KINDS) PyErr_SetString(PyExc_ValueError, "learn: one byte for each character");
    else if (bpe->kinds == NULL && (bpe->kinds = malloc(NUM_KINDS)) == NULL) PyErr_NoMemory();
    else memcpy(bpe->kinds, kinds.buf, NUM_KINDS);
    PyBuffer_Release(&kinds);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static void bpe_dealloc(PyObject *object) {
    Bpe *bpe = (Bpe *)object;
    void *own[] = {bpe->merges,         bpe->some,           bpe->made,           bpe->pairs, bpe->kinds, bpe->text, bpe->starts,
                   bpe->caches[0].places, bpe->caches[1].places, bpe->caches[2].places};
    for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
    core_free(object);
}

static int bpe_fill(Bpe *bpe, const uint32_t *bytes, const uint32_t *merges, int64_t count) {
    uint64_t room = 1024;
    while (room < (uint64_t)count * 2) room *= 2;
    bpe->merge_mask = room - 1;
    bpe->merges = core_table(room * 8), bpe->some = core_table(room / 2), bpe->pairs = core_table(65536 * 4);
    bpe->made = malloc((size_t)(count + 1) * 4);
    if (!bpe->merges || !bpe->some || !bpe->pairs || !bpe->made) return -1;
    /* Of Python sources 90 in 100 words have up to 8 bytes, and all but 7 in 10,000 up to 32: 8, 16 and 2 MiB. */
    static const int PLACE_BITS[] = {18, 17, 12}, KEY_BYTES[] = {8, 32, MAX_KEY};
    for (int k = 0; k < 3; k++) {
        bpe->caches[k].shift = 64 - PLACE_BITS[k];
        if ((bpe->caches[k].places = core_table(((size_t)KEY_BYTES[k] * 4) << PLACE_BITS[k])) == NULL) return -1;
    }
    memcpy(bpe->bytes, bytes, sizeof bpe->bytes);
    for (int64_t k = 0; k < count; k++) {
        uint64_t pair = (uint64_t)merges[3 * k] << 21 | merges[3 * k + 1], hash = mixed(pair) >> 4;
        uint64_t *merge = merge_of(bpe, pair, hash);
        if (*merge == 0) *merge = pair << 22 | (uint64_t)(k + 1);
        *word_of(bpe, hash) |= bit_of(hash);
        bpe->made[k] = merges[3 * k + 2];
    }
    for (uint32_t k = 0; k < 65536; k++) bpe->pairs[k] = rank_of(bpe, bytes[k >> 8], bytes[k & 255]);
    return 0;
}

static int is_fit(const uint32_t *ids, int64_t count, unsigned end, int width) {
    uint32_t most = end;
    for (int64_t k = 0; k < count; k++) most = ids[k] > most ? ids[k] : most;
    return most < (width == 2 ? 1 << 16 : MAX_ID);
}

static PyObject *bpe_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    (void)options;
    Py_buffer bytes, merges;
    unsigned end;
    int width;
    Bpe *bpe = NULL;
    if (!PyArg_ParseTuple(args, "y*y*Ii:Bpe", &bytes, &merges, &end, &width)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (bytes.len != 1024 || merges.len % 12 != 0 || merges.len / 12 >= MAX_ID || (width != 2 && width != 4) ||
        (uintptr_t)bytes.buf % 4 || (uintptr_t)merges.buf % 4 || !is_fit(bytes.buf, 256, end, width) || !is_fit(merges.buf, merges.len / 4, end, width))
        PyErr_SetString(PyExc_ValueError, "Bpe: 256 ids of bytes, merges by three, ids of 2 or 4 bytes below 2^21");
    else if ((bpe = (Bpe *)allocate(type, 0)) != NULL) {
        bpe->end = end, bpe->width = width;
        if (bpe_fill(bpe, bytes.buf, merges.buf, merges.len / 12) < 0) {
            Py_CLEAR(bpe);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&bytes);
    PyBuffer_Release(&merges);
    return (PyObject *)bpe;
}

static PyMethodDef bpe_methods[] = {
    {"encode", bpe_encode, METH_VARARGS,
     "(documents, out, counts) -> number of ids, the end after each document, or -1 without room. A count of -1: left to others."},
    {"learn", bpe_learn, METH_O, "The kinds of characters: 0 unknown, 1 white space, 2 letter, 3 number, 4 any other."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bpe_slots[] = {
    {Py_tp_new, (void *)bpe_new},
    {Py_tp_dealloc, (void *)bpe_dealloc},
    {Py_tp_methods, bpe_methods},
    {0, NULL},
};

int core_add_bpe(PyObject *module) { return core_add_type(module, "millrace._core.Bpe", sizeof(Bpe), bpe_slots, NULL); }
