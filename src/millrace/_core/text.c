/* Plain text: where documents begin and end, and whether text is valid utf-8. */
#include "core.h"

static const uint64_t HIGH = 0x8080808080808080u;

#if defined(__SSE2__) && !defined(MILLRACE_PORTABLE) /* make sanitize runs the other */
#include <emmintrin.h>

#define AT_ONCE 16

static __m128i loaded(const void *text) { return _mm_loadu_si128((const __m128i *)text); }

static unsigned equal(__m128i bytes, char byte) { return (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte))); }

static int64_t first_gap(const char *text) {
    unsigned both = equal(loaded(text), '\n') & equal(loaded(text + 1), '\n');
    return both == 0 ? AT_ONCE : __builtin_ctz(both);
}
#else
#define AT_ONCE 8

static const uint64_t ONES = 0x0101010101010101u;

/* A byte of ``other`` is zero where both are newlines; only the lowest zero byte is certain. */
static int64_t first_gap(const char *text) {
    uint64_t first, second;
    memcpy(&first, text, 8);
    memcpy(&second, text + 1, 8);
    uint64_t other = (first ^ (ONES * '\n')) | (second ^ (ONES * '\n')), zeros = (other - ONES) & ~other & HIGH;
    return zeros == 0 ? AT_ONCE : __builtin_ctzll(zeros) / 8;
}
#endif

/* Pairs of places, as many as needed. */
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

/* The first of two newlines in a row, from ``at`` on; ``size`` where there are none. */
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
        if ((first >= 0x80 && first < 0xC2) || first > 0xF4 || end - at <= (int64_t)more) return 0;
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

PyMethodDef core_text_functions[] = {
    {"is_utf8", is_utf8, METH_VARARGS, "Whether text[first:last] is valid utf-8."},
    {"between_gaps", between_gaps, METH_O, "Where documents between empty lines start and end."},
    {NULL, NULL, 0, NULL},
};
