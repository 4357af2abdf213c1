/* Documents as Python gives them: (text, starts, stops), document k being text[starts[k] : stops[k]]. */
#include "core.h"

int core_documents_init(Documents *documents, PyObject *given) {
    PyObject *text, *starts, *stops;
    int64_t others;
    *documents = (Documents){.count = 0};
    if (!PyTuple_Check(given)) return PyErr_Format(PyExc_TypeError, "documents are (text, starts, stops)"), -1;
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

void core_document(const Documents *documents, int64_t k, const char **text, int64_t *size) {
    *text = (const char *)documents->text.buf + documents->starts[k];
    *size = documents->stops[k] - documents->starts[k];
}

void core_documents_free(Documents *documents) {
    PyBuffer_Release(&documents->text);
    PyBuffer_Release(&documents->start);
    PyBuffer_Release(&documents->stop);
}
