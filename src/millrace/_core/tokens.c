/* Sizes of documents, documents with room for their ends, and runs of values copied to shards. */
#include "core.h"

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

static PyObject *measure(PyObject *module, PyObject *given) {
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

static PyObject *join_with_zeros(PyObject *module, PyObject *given) {
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

PyMethodDef core_tokens_functions[] = {
    {"copy_runs", copy_runs, METH_VARARGS, "(values, bytes of one, edges, out, bytes of one): copies the runs [first, last) one after the other; single bytes may become two."},
    {"measure", measure, METH_O, "Bytes and characters of every document, as int64."},
    {"join_with_zeros", join_with_zeros, METH_O, "Documents as one text with a zero byte after each, and their lengths with it, as int64."},
    {NULL, NULL, 0, NULL},
};
