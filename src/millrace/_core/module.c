/* The module object, and what the other files share. Every function has a numpy twin that gives the same bytes. */
#include "ring.h"

#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define LARGE_PAGE (2 << 20)

int core_add_type(PyObject *module, const char *name, size_t size, PyType_Slot *slots, PyTypeObject **kept) {
    unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE;
    PyType_Spec spec = {.name = name, .basicsize = (int)size, .flags = flags, .slots = slots};
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (type == NULL) return -1;
    if (kept != NULL) *kept = (PyTypeObject *)type; /* for good: the types live as long as the process */
    int status = PyModule_AddType(module, (PyTypeObject *)type);
    if (kept == NULL) Py_DECREF(type);
    return status;
}

void core_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

void *core_table(size_t size) {
    void *found = NULL;
#ifdef MADV_HUGEPAGE
    if (size < LARGE_PAGE) return calloc(size, 1);
    if (posix_memalign(&found, LARGE_PAGE, size) != 0) return NULL;
    madvise(found, size, MADV_HUGEPAGE);
    memset(found, 0, size);
#else
    found = calloc(size, 1);
#endif
    return found;
}

int core_is_aligned(const Py_buffer *buffer, size_t bytes) {
    if (bytes == 0 || (uintptr_t)buffer->buf % bytes == 0) return 1;
    PyErr_Format(PyExc_ValueError, "numbers of %zu bytes begin at an address that is no multiple of it; give a copy", bytes);
    return 0;
}

const int64_t *core_int64s(PyObject *object, Py_buffer *buffer, int64_t *count) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_ND | PyBUF_FORMAT) < 0) return NULL;
    const char *format = buffer->format != NULL ? buffer->format : "";
    if (*format == '<' || *format == '=') format++;
    if (buffer->itemsize != 8 || strchr("lq", *format) == NULL || *format == 0) {
        PyErr_Format(PyExc_TypeError, "expected contiguous int64 numbers, got format %s", buffer->format);
        PyBuffer_Release(buffer);
        return NULL;
    }
    if (!core_is_aligned(buffer, 8)) {
        PyBuffer_Release(buffer);
        return NULL;
    }
    *count = buffer->len / 8;
    return buffer->buf != NULL ? buffer->buf : (const void *)""; /* of none: NULL would be an error */
}

int64_t *core_copied_int64s(PyObject *object, int64_t *count) {
    Py_buffer buffer;
    const int64_t *numbers = core_int64s(object, &buffer, count);
    if (numbers == NULL) return NULL;
    int64_t *copy = malloc((size_t)buffer.len + sizeof *copy);
    if (copy == NULL) PyErr_NoMemory();
    else if (buffer.len) memcpy(copy, numbers, (size_t)buffer.len);
    PyBuffer_Release(&buffer);
    return copy;
}

static PyObject *error_class(const char *kind) {
    PyObject *errors = PyImport_ImportModule("millrace.errors");
    PyObject *class = errors == NULL ? NULL : PyObject_GetAttrString(errors, kind);
    Py_XDECREF(errors);
    return class;
}

PyObject *core_raise(const char *kind, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyObject *message = PyUnicode_FromFormatV(format, arguments), *class = error_class(kind);
    va_end(arguments);
    if (class != NULL && message != NULL) PyErr_SetObject(class, message);
    Py_XDECREF(class);
    Py_XDECREF(message);
    return NULL;
}

int core_is_expected(void) {
    PyObject *kind, *value, *trace;
    if (PyErr_ExceptionMatches(PyExc_OSError) || PyErr_ExceptionMatches(PyExc_MemoryError)) return 1;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *class = error_class("MillraceError");
    int found = class == NULL ? 0 : PyErr_GivenExceptionMatches(kind, class);
    Py_XDECREF(class);
    PyErr_Restore(kind, value, trace);
    return found;
}

void core_keep_error(PyObject **place) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    if (trace != NULL) PyException_SetTraceback(value, trace);
    Py_XDECREF(kind);
    Py_XDECREF(trace);
    Py_XDECREF(*place);
    *place = value;
}

PyObject *core_raise_kept(PyObject **place) {
    PyErr_SetObject((PyObject *)Py_TYPE(*place), *place);
    Py_CLEAR(*place);
    return NULL;
}

static _Thread_local int64_t lock_wait_ns; /* of this thread, since it began */

PyThreadState *core_save(void) {
    int64_t began = core_now();
    PyThreadState *state = PyEval_SaveThread();
    lock_wait_ns += core_now() - began;
    return state;
}

void core_restore(PyThreadState *state) {
    int64_t began = core_now();
    PyEval_RestoreThread(state);
    lock_wait_ns += core_now() - began;
}

static PyObject *lock_wait(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    return PyLong_FromLongLong(lock_wait_ns);
}

static PyMethodDef lock_functions[] = {
    {"lock_wait", lock_wait, METH_NOARGS, "Nanoseconds that this thread has waited for the GIL, before and after its work in the core."},
    {NULL, NULL, 0, NULL},
};

static int core_exec(PyObject *module) {
    PyMethodDef *const functions[] = {lock_functions, core_permute_functions, core_order_functions, core_table_functions, core_text_functions,
                                      core_tokens_functions,  core_clean_functions, core_hashes_functions, core_images_functions,
                                      core_pack_functions,    core_mixture_functions};
    int (*const add[])(PyObject *) = {core_add_map,     core_add_column, core_add_gather, core_add_program,
                                      core_add_bpe,     core_add_repeats, core_add_ring,   core_add_mixture};
    for (size_t k = 0; k < sizeof functions / sizeof *functions; k++)
        if (PyModule_AddFunctions(module, functions[k]) < 0) return -1;
    for (size_t k = 0; k < sizeof add / sizeof *add; k++)
        if (add[k](module) < 0) return -1;
    return 0;
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, (void *)core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "millrace._core",
    .m_doc = "The native core: what the pure Python twins do, without the GIL.",
    .m_slots = core_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
