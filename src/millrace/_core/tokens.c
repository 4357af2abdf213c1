/* Documents for an engine that takes one text and splits it as GPT-2 does: joined so that each has the ids it has alone,
   and the ids taken apart again. */
#include "core.h"

/* What stands between two documents. White space and what is none are always parted, and one newline between two that
   are none is a word of its own: so it is enough before a document that does not begin with white space, and a full stop
   behind it before one that does. Everything else has the separator, which the engine knows but takes its time over. */
enum { NEWLINE, STOP, SEPARATOR };

static int is_graphic(unsigned char byte) { return byte > 32 && byte < 127; }

static char between(const char *before, int64_t size, const char *after, int64_t next) {
    if (size == 0 || next == 0 || !is_graphic((unsigned char)before[size - 1])) return SEPARATOR;
    if (is_graphic((unsigned char)after[0])) return NEWLINE;
    return after[0] == ' ' || after[0] == '\t' || after[0] == '\n' ? STOP : SEPARATOR;
}

static int64_t characters_of(const char *text, int64_t size) {
    static const uint64_t HIGH = 0x8080808080808080u;
    int64_t at = 0, more = 0;
    uint64_t word, high = 0;
    for (; at + 8 <= size; at += 8, high |= word) memcpy(&word, text + at, 8); /* gcc takes several at a time */
    for (; at < size; at++) high |= (unsigned char)text[at];
    if ((high & HIGH) == 0) return size;
    for (at = 0; at < size; at++) more += (text[at] & 0xC0) == 0x80; /* within a character */
    return size - more;
}

static PyObject *measured(PyObject *module, PyObject *given) {
    (void)module;
    Documents documents;
    if (core_documents_init(&documents, given) < 0) return NULL;
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents.count * 8), *found = NULL;
    PyObject *characters = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents.count * 8);
    for (int64_t k = 0; k < documents.count && lengths != NULL && characters != NULL; k++) {
        const char *text;
        int64_t size;
        core_document(&documents, k, &text, &size);
        ((int64_t *)PyBytes_AsString(lengths))[k] = size;
        ((int64_t *)PyBytes_AsString(characters))[k] = characters_of(text, size);
    }
    if (lengths != NULL && characters != NULL) found = PyTuple_Pack(2, lengths, characters);
    Py_XDECREF(lengths);
    Py_XDECREF(characters);
    core_documents_free(&documents);
    return found;
}

static PyObject *spaced(PyObject *module, PyObject *given) {
    (void)module;
    Documents documents;
    const char *text;
    int64_t total = 0, size;
    if (core_documents_init(&documents, given) < 0) return NULL;
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)documents.count * 8), *whole = NULL, *found = NULL;
    for (int64_t k = 0; k < documents.count && lengths != NULL; k++, total += size + 1) {
        core_document(&documents, k, &text, &size);
        ((int64_t *)PyBytes_AsString(lengths))[k] = size + 1;
    }
    if (lengths != NULL) whole = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    char *to = whole == NULL ? NULL : PyBytes_AsString(whole);
    for (int64_t k = 0; k < documents.count && to != NULL; k++, *to++ = 0) {
        core_document(&documents, k, &text, &size);
        memcpy(to, text, (size_t)size);
        to += size;
    }
    if (whole != NULL) found = PyTuple_Pack(2, whole, lengths);
    Py_XDECREF(whole);
    Py_XDECREF(lengths);
    core_documents_free(&documents);
    return found;
}

static PyObject *joined(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *whole = NULL, *found = NULL;
    Documents documents;
    const char *separator, *text, *before = NULL;
    Py_ssize_t separator_size;
    int64_t size, total = 0, last = 0;
    if (!PyArg_ParseTuple(args, "Oy#:joined", &given, &separator, &separator_size)) return NULL;
    if (core_documents_init(&documents, given) < 0) return NULL;
    PyObject *kinds = PyBytes_FromStringAndSize(NULL, documents.count > 0 ? (Py_ssize_t)documents.count - 1 : 0);
    char *kind = kinds == NULL ? NULL : PyBytes_AsString(kinds);
    for (int64_t k = 0; k < documents.count && kind != NULL; k++, before = text, last = size) {
        core_document(&documents, k, &text, &size);
        total += size;
        if (k == 0) continue;
        kind[k - 1] = between(before, last, text, size);
        total += kind[k - 1] == SEPARATOR ? separator_size : kind[k - 1] + 1;
    }
    if (kind != NULL) whole = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    char *to = whole == NULL ? NULL : PyBytes_AsString(whole);
    for (int64_t k = 0; k < documents.count && to != NULL; k++) {
        core_document(&documents, k, &text, &size);
        if (k > 0) {
            const char *mark = kind[k - 1] == SEPARATOR ? separator : "\n.";
            Py_ssize_t more = kind[k - 1] == SEPARATOR ? separator_size : kind[k - 1] + 1;
            memcpy(to, mark, (size_t)more);
            to += more;
        }
        memcpy(to, text, (size_t)size);
        to += size;
    }
    if (whole != NULL) found = PyTuple_Pack(2, whole, kinds);
    Py_XDECREF(whole);
    Py_XDECREF(kinds);
    core_documents_free(&documents);
    return found;
}

typedef struct {
    const uint32_t *ids;
    const int32_t *sizes; /* in bytes, of every id; larger than any text of those that stand for none */
    const int64_t *lengths; /* of the documents, in bytes */
    const char *kinds;
    int64_t num_ids, num_sizes, num_documents;
    uint32_t newline, stop, separator, end;
} Ids;

static int is_next(const Ids *from, int64_t at, uint32_t id) { return at < from->num_ids && from->ids[at] == id; }

/* How many tokens there are with an end behind each document; -1 where an id crosses its end, or one is lost. */
#define PART(NAME, TYPE)                                                                                          \
    static int64_t NAME(const Ids *from, TYPE *restrict out, int64_t *restrict counts) {                          \
        const uint32_t *ids = from->ids;                                                                          \
        const int32_t *sizes = from->sizes;                                                                       \
        const int64_t num_ids = from->num_ids, num_sizes = from->num_sizes;                                       \
        int64_t at = 0, to = 0;                                                                                   \
        for (int64_t k = 0; k < from->num_documents; k++) {                                                       \
            int64_t first = to, left = from->lengths[k];                                                          \
            for (; left > 0 && at < num_ids && ids[at] < num_sizes; at++) {                                       \
                left = (int64_t)((uint64_t)left - (uint64_t)(int64_t)sizes[ids[at]]);                             \
                out[to++] = (TYPE)ids[at];                                                                        \
            }                                                                                                     \
            if (left != 0) return -1;                                                                             \
            out[to++] = (TYPE)from->end;                                                                          \
            counts[k] = to - first;                                                                               \
            if (k + 1 == from->num_documents) break;                                                              \
            if (!is_next(from, at++, from->kinds[k] == SEPARATOR ? from->separator : from->newline)) return -1;   \
            if (from->kinds[k] == STOP && !is_next(from, at++, from->stop)) return -1;                            \
        }                                                                                                         \
        return at == num_ids ? to : -1;                                                                           \
    }
PART(part_16, uint16_t)
PART(part_32, uint32_t)

static PyObject *parted(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer ids, sizes, lengths, kinds, out, counts;
    Py_ssize_t width;
    Ids from;
    if (!PyArg_ParseTuple(args, "y*y*y*y*(IIII)w*nw*:parted", &ids, &sizes, &lengths, &kinds, &from.newline, &from.stop,
                          &from.separator, &from.end, &out, &width, &counts))
        return NULL;
    from.ids = ids.buf, from.sizes = sizes.buf, from.lengths = lengths.buf, from.kinds = kinds.buf;
    from.num_ids = ids.len / 4, from.num_sizes = sizes.len / 4, from.num_documents = lengths.len / 8;
    PyObject *found = NULL;
    int is_fit = (width == 2 || width == 4) && out.len / width > from.num_ids && counts.len == lengths.len &&
                 kinds.len + 1 >= from.num_documents;
    is_fit = is_fit && core_is_aligned(&ids, 4) && core_is_aligned(&sizes, 4) && core_is_aligned(&lengths, 8) &&
             core_is_aligned(&counts, 8) && core_is_aligned(&out, (size_t)width);
    if (!is_fit && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "parted: the arrays do not fit each other");
    if (!is_fit) goto free;
    if (width == 2) found = PyLong_FromLongLong(part_16(&from, out.buf, counts.buf));
    else found = PyLong_FromLongLong(part_32(&from, out.buf, counts.buf));
free:
    PyBuffer_Release(&ids);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&kinds);
    PyBuffer_Release(&out);
    PyBuffer_Release(&counts);
    return found;
}

static void copy_wider(const unsigned char *from, int64_t count, uint16_t *to) {
    for (int64_t k = 0; k < count; k++) to[k] = from[k];
}

static PyObject *copy_runs(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given;
    Py_buffer values, out, numbers;
    Py_ssize_t from, to;
    int64_t count = 0, at = 0;
    int is_fit = 1;
    if (!PyArg_ParseTuple(args, "y*nOw*n:copy_runs", &values, &from, &given, &out, &to)) return NULL;
    const int64_t *edges = core_int64s(given, &numbers, &count);
    if (edges == NULL) goto free;
    is_fit = count % 2 == 0 && from > 0 && (to == from || (to == 2 && from == 1 && (uintptr_t)out.buf % 2 == 0));
    int64_t most = is_fit ? values.len / from : 0, room = is_fit ? out.len / to : 0;
    for (int64_t k = 0; k < count && is_fit; k += 2) {
        int64_t first = edges[k], length = first < 0 || edges[k + 1] < first ? -1 : edges[k + 1] - first;
        is_fit = length >= 0 && edges[k + 1] <= most && length <= room - at;
        if (!is_fit) break;
        const char *source = (const char *)values.buf + first * from;
        char *target = (char *)out.buf + at * to;
        if (to == from) memcpy(target, source, (size_t)(length * to));
        else copy_wider((const unsigned char *)source, length, (uint16_t *)target);
        at += length;
    }
    if (!is_fit || at != room) PyErr_SetString(PyExc_ValueError, "copy_runs: the runs do not fit their arrays");
    PyBuffer_Release(&numbers);
free:
    PyBuffer_Release(&values);
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef token_functions[] = {
    {"copy_runs", copy_runs, METH_VARARGS, "(values, bytes of one, edges, out, bytes of one): those of [first, last), [first, last), ...; single bytes may become two."},
    {"measured", measured, METH_O, "Bytes and characters of every document, as int64."},
    {"spaced", spaced, METH_O, "Documents as one, a zero byte behind each, and how long each is with it, as int64."},
    {"joined", joined, METH_VARARGS, "Documents as one text, and what stands between each and the next."},
    {"parted", parted, METH_VARARGS, "The ids of such a text with an end behind each document; -1 if they do not fit."},
    {NULL, NULL, 0, NULL},
};

int core_add_tokens(PyObject *module) { return PyModule_AddFunctions(module, token_functions); }
