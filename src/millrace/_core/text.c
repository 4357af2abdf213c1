/* Documents of plain text, many at a time: cut out of a stretch as they are, or cleaned. */
#include "core.h"

static const uint64_t HIGH = 0x8080808080808080u;

#if defined(__SSE2__) && !defined(MILLRACE_PORTABLE) /* make sanitize runs the other */
#include <emmintrin.h>

#define AT_ONCE 16

static __m128i loaded(const void *text) { return _mm_loadu_si128((const __m128i *)text); }

static unsigned equal(__m128i bytes, char byte) { return (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte))); }

/* How many of the next bytes clean() leaves as they are, behind one that is no blank: what is printable, and single spaces
   between two of those. */
static int64_t as_they_are(const unsigned char *from) {
    __m128i bytes = loaded(from);
    unsigned spaces = equal(bytes, ' '), others = equal(bytes, 127);
    others = (unsigned)_mm_movemask_epi8(_mm_cmpgt_epi8(bytes, _mm_set1_epi8(' '))) & ~others;
    unsigned fine = others | (spaces & (others << 1 | 1) & others >> 1);
    return __builtin_ctz(~fine);
}

/* How many of the next bytes are blanks; ``newlines`` are none, one, or more. */
static int64_t blanks_at(const unsigned char *from, int64_t *newlines) {
    __m128i bytes = loaded(from);
    unsigned lines = equal(bytes, '\n'), blanks = lines | equal(bytes, ' ') | equal(bytes, '\t');
    int64_t count = __builtin_ctz(~blanks);
    lines &= (1u << count) - 1;
    *newlines += (lines != 0) + ((lines & (lines - 1)) != 0);
    return count;
}

static int64_t first_gap(const char *text) {
    unsigned both = equal(loaded(text), '\n') & equal(loaded(text + 1), '\n');
    return both == 0 ? AT_ONCE : __builtin_ctz(both);
}
#else
#define AT_ONCE 8

static const uint64_t ONES = 0x0101010101010101u;

/* All eight, if they are printable and single spaces; without the last if that is a space, since nobody knows yet what
   follows; 0 where it is not as simple. */
static int64_t as_they_are(const unsigned char *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    uint64_t low = word & ~HIGH;
    uint64_t is_odd = (word | ((low + ONES * (127 - 126)) | ~(low + ONES * (128 - 32)))) & HIGH; /* > 126, < 32 */
    uint64_t other = word ^ (ONES * ' ');
    uint64_t is_space = ~(((other & ~HIGH) + ~HIGH) | other | ~HIGH);
    if (is_odd || (is_space & (is_space << 8))) return 0;
    return is_space >> 63 ? 7 : 8;
}

static int64_t blanks_at(const unsigned char *from, int64_t *newlines) {
    int64_t count = 0;
    for (; count < AT_ONCE && (from[count] == ' ' || from[count] == '\t' || from[count] == '\n'); count++)
        *newlines += from[count] == '\n';
    return count;
}

/* A byte of ``other`` is zero where both are there, and the lowest zero byte is the one that is found for certain. */
static int64_t first_gap(const char *text) {
    uint64_t first, second;
    memcpy(&first, text, 8);
    memcpy(&second, text + 1, 8);
    uint64_t other = (first ^ (ONES * '\n')) | (second ^ (ONES * '\n')), zeros = (other - ONES) & ~other & HIGH;
    return zeros == 0 ? AT_ONCE : __builtin_ctzll(zeros) / 8;
}
#endif

/* The bytes of the character at ``at`` that clean() leaves as it is, by a table of those beyond ASCII; 0 where it may not. */
static int plain_bytes(const unsigned char *plain, const unsigned char *at, const unsigned char *end) {
    unsigned first = *at, size = first < 0xC2 || first > 0xF4 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (first > ' ' && first < 127) return 1;
    if (plain == NULL || size == 0 || (size_t)(end - at) < size) return 0;
    unsigned point = first & (0x7Fu >> size);
    for (unsigned k = 1; k < size; k++) {
        if ((at[k] & 0xC0) != 0x80) return 0;
        point = point << 6 | (at[k] & 0x3Fu);
    }
    int is_short = point >= (size == 2 ? 0x80u : size == 3 ? 0x800u : 0x10000u); /* as short as it can be */
    return is_short && point < NUM_PLAIN && plain[point] ? (int)size : 0;
}

/* White space as clean() leaves it; -1 where the text is more than plain characters, tabs and newlines. */
static int64_t clean(const unsigned char *from, int64_t size, unsigned char *to, const unsigned char *plain) {
    const unsigned char *end = from + size;
    unsigned char *at = to;
    while (from < end) {
        int64_t newlines = 0, count = AT_ONCE;
        const unsigned char *blanks = from;
        for (; count == AT_ONCE && end - from >= AT_ONCE; from += count) count = blanks_at(from, &newlines);
        for (; from < end && (*from == ' ' || *from == '\t' || *from == '\n'); from++) newlines += *from == '\n';
        if (from == end) break;
        if (at != to && from != blanks) {
            if (newlines == 0) *at++ = ' ';
            if (newlines > 0) *at++ = '\n';
            if (newlines > 1) *at++ = '\n';
        }
        do {
            int bytes = plain_bytes(plain, from, end);
            if (bytes == 0) return -1;
            for (; bytes > 0; bytes--) *at++ = *from++;
            for (int64_t same = AT_ONCE; same > 0 && end - from >= AT_ONCE; from += same, at += same) {
                same = as_they_are(from);
                memcpy(at, from, AT_ONCE);
            }
            for (; from < end && *from > ' ' && *from < 127; from++) *at++ = *from;
        } while (from < end && *from != ' ' && *from != '\t' && *from != '\n');
    }
    return at - to;
}

static PyObject *documents(PyObject *module, PyObject *args) {
    (void)module;
    Documents documents;
    if (core_documents_init(&documents, args) < 0) return NULL;
    PyObject *list = PyList_New((Py_ssize_t)documents.count);
    for (int64_t k = 0; k < documents.count && list != NULL; k++) {
        const char *text;
        int64_t size;
        core_document(&documents, k, &text, &size);
        PyObject *document = PyBytes_FromStringAndSize(text, (Py_ssize_t)size);
        if (document == NULL || PyList_SetItem(list, (Py_ssize_t)k, document) < 0) Py_CLEAR(list);
    }
    core_documents_free(&documents);
    return list;
}

static int note(PyObject *others, int64_t k) {
    PyObject *number = PyLong_FromLongLong(k);
    int failed = number == NULL || PyList_Append(others, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* The documents cleaned, one behind the other: as starts and stops in a text; those left to Python are empty. */
static PyObject *all_cleaned(const Documents *documents, const unsigned char *plain) {
    int64_t total = 0, at = 0, size;
    const char *text;
    for (int64_t k = 0; k < documents->count; k++) {
        core_document(documents, k, &text, &size);
        total += size;
    }
    char *room = PyMem_Malloc((size_t)total + 1);
    PyObject *others = PyList_New(0), *starts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents->count * 8);
    PyObject *stops = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents->count * 8), *found = NULL;
    int is_fine = room != NULL && others != NULL && starts != NULL && stops != NULL;
    for (int64_t k = 0; k < documents->count && is_fine; k++) {
        core_document(documents, k, &text, &size);
        size = clean((const unsigned char *)text, size, (unsigned char *)room + at, plain);
        if (size < 0) is_fine = note(others, k) == 0;
        ((int64_t *)PyBytes_AsString(starts))[k] = at;
        ((int64_t *)PyBytes_AsString(stops))[k] = at += size < 0 ? 0 : size;
    }
    if (is_fine) found = Py_BuildValue("(y#OOO)", room, (Py_ssize_t)at, starts, stops, others);
    else if (room == NULL) PyErr_NoMemory();
    PyMem_Free(room);
    Py_XDECREF(others);
    Py_XDECREF(starts);
    Py_XDECREF(stops);
    return found;
}

static PyObject *cleaned(PyObject *module, PyObject *args) {
    (void)module;
    Documents documents;
    Py_buffer plain = {0};
    PyObject *given, *table, *found = NULL;
    if (!PyArg_ParseTuple(args, "OO", &given, &table) || core_documents_init(&documents, given) < 0) return NULL;
    if (table == Py_None || PyObject_GetBuffer(table, &plain, PyBUF_SIMPLE) == 0) {
        if (plain.buf != NULL && plain.len != NUM_PLAIN) PyErr_SetString(PyExc_ValueError, "cleaned: one byte for each character");
        else found = all_cleaned(&documents, plain.buf);
    }
    if (plain.buf != NULL) PyBuffer_Release(&plain);
    core_documents_free(&documents);
    return found;
}

/* Pairs of places, as many as there turn out to be. */
typedef struct {
    int64_t *starts, *ends;
    int64_t count, room;
} Places;

static int places_grow(Places *places) {
    int64_t room = places->room * 2 + 4096;
    int64_t *starts = PyMem_Realloc(places->starts, (size_t)room * sizeof *starts);
    if (starts != NULL) places->starts = starts;
    int64_t *ends = PyMem_Realloc(places->ends, (size_t)room * sizeof *ends);
    if (ends != NULL) places->ends = ends;
    if (starts == NULL || ends == NULL) return -1;
    places->room = room;
    return 0;
}

/* The first of two newlines that follow each other, from ``at`` on; ``size`` where there are none. */
static int64_t gap_from(const char *text, int64_t at, int64_t size) {
    for (; at + AT_ONCE < size; at += AT_ONCE) {
        int64_t found = first_gap(text + at);
        if (found < AT_ONCE) return at + found;
    }
    for (; at + 1 < size; at++)
        if (text[at] == '\n' && text[at + 1] == '\n') return at;
    return size;
}

static PyObject *between_gaps(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer text;
    Places places = {NULL, NULL, 0, 0};
    PyObject *found = NULL;
    if (PyObject_GetBuffer(object, &text, PyBUF_SIMPLE) < 0) return NULL;
    int64_t at = 0, size = text.len;
    const char *bytes = text.buf;
    for (;;) {
        if (places.count == places.room && places_grow(&places) < 0) {
            PyErr_NoMemory();
            goto done;
        }
        places.starts[places.count] = at;
        if ((at = gap_from(bytes, at, size)) == size) break;
        places.ends[places.count++] = at;
        while (at < size && bytes[at] == '\n') at++;
    }
    int64_t last = places.starts[places.count] < size; /* it has no end yet */
    found = Py_BuildValue("(y#y#)", (char *)places.starts, (Py_ssize_t)((places.count + last) * 8), (char *)places.ends,
                          (Py_ssize_t)(places.count * 8));
done:
    PyBuffer_Release(&text);
    PyMem_Free(places.starts);
    PyMem_Free(places.ends);
    return found;
}

/* As strictly as Python decodes: nothing overlong, no surrogates, nothing beyond U+10FFFF. */
static int is_valid(const unsigned char *at, const unsigned char *end) {
    uint64_t word;
    while (at < end) {
        while (end - at >= 8 && (memcpy(&word, at, 8), (word & HIGH) == 0)) at += 8;
        if (at == end) break;
        unsigned first = *at, more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        unsigned low = 0x80, high = 0xBF; /* of the second byte */
        if (first == 0xE0) low = 0xA0;
        if (first == 0xED) high = 0x9F;
        if (first == 0xF0) low = 0x90;
        if (first == 0xF4) high = 0x8F;
        if ((first >= 0x80 && first < 0xC2) || first > 0xF4 || (unsigned)(end - at) <= more) return 0;
        for (unsigned k = 1; k <= more; k++, low = 0x80, high = 0xBF)
            if (at[k] < low || at[k] > high) return 0;
        at += more + 1;
    }
    return 1;
}

static PyObject *is_utf8(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer text;
    Py_ssize_t first, last;
    if (!PyArg_ParseTuple(args, "y*nn:is_utf8", &text, &first, &last)) return NULL;
    PyObject *found = NULL;
    const unsigned char *start = text.buf;
    if (first < 0 || first > last || last > text.len) PyErr_SetString(PyExc_ValueError, "outside of the text");
    else found = PyBool_FromLong(is_valid(start + first, start + last));
    PyBuffer_Release(&text);
    return found;
}

static PyMethodDef text_functions[] = {
    {"is_utf8", is_utf8, METH_VARARGS, "Whether text[first:last] is valid utf-8."},
    {"between_gaps", between_gaps, METH_O, "Where documents between empty lines start and end."},
    {"documents", documents, METH_VARARGS, "text[starts[k] : stops[k]] of every k, as a list of bytes."},
    {"cleaned", cleaned, METH_VARARGS,
     "(documents, table) -> text, starts, stops and others: documents cleaned, and the numbers of those that hold more than "
     "printable ASCII, or than a table of characters says."},
    {NULL, NULL, 0, NULL},
};

int core_add_text(PyObject *module) { return PyModule_AddFunctions(module, text_functions); }
