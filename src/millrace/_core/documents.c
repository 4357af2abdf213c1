/* Documents as they are given to the core: a list of bytes, or (text, starts, stops) of such that lie in one. */
#include "core.h"

static int lump_init(Documents *documents, PyObject *given) {
    PyObject *text, *starts, *stops;
    int64_t others;
    if (!PyArg_ParseTuple(given, "OOO", &text, &starts, &stops)) return -1;
    if (PyObject_GetBuffer(text, &documents->text, PyBUF_SIMPLE) < 0) return -1;
    if ((documents->starts = core_int64s(starts, &documents->start, &documents->count)) == NULL) goto text;
    if ((documents->stops = core_int64s(stops, &documents->stop, &others)) == NULL) goto start;
    for (int64_t k = 0; k < documents->count && others == documents->count; k++) {
        int64_t first = documents->starts[k], last = documents->stops[k];
        if (first < 0 || first > last || last > documents->text.len) others = -1;
        else if (last - first > documents->longest) documents->longest = last - first;
    }
    if (others == documents->count) return 0;
    PyErr_SetString(PyExc_ValueError, "documents lie outside of their text");
    PyBuffer_Release(&documents->stop);
start:
    PyBuffer_Release(&documents->start);
text:
    PyBuffer_Release(&documents->text);
    return -1;
}

int core_documents_init(Documents *documents, PyObject *given) {
    *documents = (Documents){.list = NULL};
    if (PyTuple_Check(given)) return lump_init(documents, given);
    if (!PyList_Check(given)) return PyErr_Format(PyExc_TypeError, "documents are a list of bytes, or lie in one text"), -1;
    documents->count = PyList_Size(given);
    for (int64_t k = 0; k < documents->count; k++) {
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyList_GetItem(given, (Py_ssize_t)k), &text, &size) < 0) return -1;
        if (size > documents->longest) documents->longest = size;
    }
    documents->list = given;
    return 0;
}

void core_document(const Documents *documents, int64_t k, const char **text, int64_t *size) {
    if (documents->list == NULL) {
        *text = (const char *)documents->text.buf + documents->starts[k];
        *size = documents->stops[k] - documents->starts[k];
        return;
    }
    PyObject *document = PyList_GetItem(documents->list, (Py_ssize_t)k);
    *text = PyBytes_AsString(document);
    *size = PyBytes_Size(document);
}

void core_documents_free(Documents *documents) {
    if (documents->list != NULL) return;
    PyBuffer_Release(&documents->text);
    PyBuffer_Release(&documents->start);
    PyBuffer_Release(&documents->stop);
}
