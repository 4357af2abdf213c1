/* Cleans many documents at a time, as clean() of prepare/text/clean/characters.py does. */
#include "core.h"

/* What a character is, by a table of those beyond ASCII: a number up to MOST_CLASS is the combining class of a mark. */
enum { LEFT, MOST_CLASS = 240, JOINING = 251, DROPPED, NEWLINE, BLANK, PLAIN };

#if defined(__SSE2__) && !defined(MILLRACE_PORTABLE) /* make sanitize runs the other */
#include <emmintrin.h>

#define AT_ONCE 16

static __m128i loaded(const void *text) { return _mm_loadu_si128((const __m128i *)text); }

static unsigned equal(__m128i bytes, char byte) { return (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte))); }

/* How many of the next bytes clean() leaves as they are, after one that is no blank: what is printable, and single spaces
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

#else
#define AT_ONCE 8

static const uint64_t ONES = 0x0101010101010101u, HIGH = 0x8080808080808080u;

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

#endif

/* The kind of the character at ``at``, and its bytes. LEFT where it is invalid or unknown. */
static int kind_of(const unsigned char *table, const unsigned char *at, const unsigned char *end, int *size) {
    unsigned first = *at, bytes = first < 0xC2 || first > 0xF4 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    *size = 1;
    if (first > ' ' && first < 127) return PLAIN;
    if (first == ' ' || first == '\t') return BLANK;
    if (first == '\n' || first == '\v' || first == '\f') return NEWLINE;
    if (first == '\r') {
        *size = end - at > 1 && at[1] == '\n' ? 2 : 1;
        return NEWLINE;
    }
    if (first < 0x80) return DROPPED;
    if (table == NULL || bytes == 0 || (size_t)(end - at) < bytes) return LEFT;
    unsigned point = first & (0x7Fu >> bytes);
    for (unsigned k = 1; k < bytes; k++) {
        if ((at[k] & 0xC0) != 0x80) return LEFT;
        point = point << 6 | (at[k] & 0x3Fu);
    }
    if (point < (bytes == 2 ? 0x80u : bytes == 3 ? 0x800u : 0x10000u) || point > 0x10FFFF) return LEFT;
    *size = (int)bytes;
    return table[point < NUM_PLAIN ? point : 0]; /* that of U+0000 is for all beyond */
}

static int is_blank(unsigned char byte) { return byte == ' ' || byte == '\t' || byte == '\n'; }

/* Writes the clean text and returns its size. -1 where a look at each character is not enough: marks that are not in their
   order, or characters that NFC may change or join with the one before.

   In a text that is in NFC already, such characters are JOINING. They stay, unless a character before them is dropped. */
static int64_t clean(const unsigned char *from, int64_t size, unsigned char *to, const unsigned char *table) {
    const unsigned char *end = from + size;
    unsigned char *at = to;
    int64_t newlines = 0;
    int is_gap = 0, is_dropped = 0, last = 0; /* last: the class of the mark before */
    while (from < end) {
        if (is_blank(*from) && end - from >= AT_ONCE) {
            int64_t count = AT_ONCE;
            for (; count == AT_ONCE && end - from >= AT_ONCE; from += count) count = blanks_at(from, &newlines);
            is_gap = 1, is_dropped = last = 0;
            continue;
        }
        int bytes, kind = kind_of(table, from, end, &bytes);
        if (kind == DROPPED) {
            is_dropped = 1, from += bytes;
            continue;
        }
        if (kind == BLANK || kind == NEWLINE) {
            newlines += kind == NEWLINE;
            is_gap = 1, is_dropped = last = 0, from += bytes;
            continue;
        }
        if (kind == LEFT || (kind == JOINING && is_dropped) || (kind <= MOST_CLASS && last > kind)) return -1;
        last = kind <= MOST_CLASS ? kind : 0;
        if (is_gap && at != to) {
            if (newlines == 0) *at++ = ' ';
            if (newlines > 0) *at++ = '\n';
            if (newlines > 1) *at++ = '\n';
        }
        newlines = is_gap = is_dropped = 0;
        for (; bytes > 0; bytes--) *at++ = *from++;
        if (kind != PLAIN) continue;
        for (int64_t same = AT_ONCE; same > 0 && end - from >= AT_ONCE; from += same, at += same) {
            same = as_they_are(from);
            memcpy(at, from, AT_ONCE);
        }
        for (; from < end && *from > ' ' && *from < 127; from++) *at++ = *from;
    }
    return at - to;
}

static int note(PyObject *others, int64_t k) {
    PyObject *number = PyLong_FromLongLong(k);
    int failed = number == NULL || PyList_Append(others, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* The clean documents, one after the other, as starts and stops in a text; those left to Python are empty. */
static PyObject *clean_all(const Documents *documents, const unsigned char *table) {
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
        size = clean((const unsigned char *)text, size, (unsigned char *)room + at, table);
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

static PyObject *clean_documents(PyObject *module, PyObject *args) {
    (void)module;
    Documents documents;
    Py_buffer kinds = {0};
    PyObject *given, *table, *found = NULL;
    if (!PyArg_ParseTuple(args, "OO", &given, &table) || core_documents_init(&documents, given) < 0) return NULL;
    if (table == Py_None || PyObject_GetBuffer(table, &kinds, PyBUF_SIMPLE) == 0) {
        if (kinds.buf != NULL && kinds.len != NUM_PLAIN) PyErr_SetString(PyExc_ValueError, "clean_documents: one byte for each character");
        else found = clean_all(&documents, kinds.buf);
    }
    if (kinds.buf != NULL) PyBuffer_Release(&kinds);
    core_documents_free(&documents);
    return found;
}

PyMethodDef core_clean_functions[] = {
    {"clean_documents", clean_documents, METH_VARARGS,
     "(documents, table) -> text, starts, stops, others: clean documents, and the numbers of those it leaves to others. The "
     "table names the characters beyond ASCII that it leaves; without a table it leaves them all."},
    {NULL, NULL, 0, NULL},
};
