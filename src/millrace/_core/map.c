/* Map: a read-only, shared memory map of a whole file, offered through the buffer protocol.
 *
 * CPython's mmap keeps a duplicate of the descriptor until the map is closed (before 3.13 always), so a
 * store of 16,384 column files would hold 16,384 descriptors. This one keeps none. */
#define _GNU_SOURCE /* mremap */
#include "core.h"

#ifdef _WIN32
int core_add_map(PyObject *module) { (void)module; return 0; } /* store/platform.py takes mmap.mmap there */
#else

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

static int64_t num_maps; /* of this process; changed with the GIL held */

typedef struct {
    PyObject_HEAD
    void *address;
    size_t length;
} Map;

static PyObject *map_of(PyTypeObject *type, void *address, size_t length) {
    Map *self = (Map *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        munmap(address, length);
        return NULL;
    }
    self->address = address;
    self->length = length;
    num_maps++;
    return (PyObject *)self;
}

static PyObject *map_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "length", "random", NULL};
    int fd, is_random = 0;
    Py_ssize_t length;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in|p", names, &fd, &length, &is_random)) return NULL;
    if (length <= 0) return PyErr_Format(PyExc_ValueError, "length=%zd must be positive", length);

    /* Past the end of the file a map is a SIGBUS: refuse here, whatever the caller checked before. */
    struct stat status;
    if (fstat(fd, &status) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    if ((long long)status.st_size < (long long)length)
        return PyErr_Format(PyExc_ValueError, "length=%zd is beyond the file's %lld bytes", length,
                            (long long)status.st_size);

    void *address;
    Py_BEGIN_ALLOW_THREADS
    address = mmap(NULL, (size_t)length, PROT_READ, MAP_SHARED, fd, 0);
#ifdef MADV_RANDOM
    if (address != MAP_FAILED && is_random) (void)madvise(address, (size_t)length, MADV_RANDOM);
#endif
    Py_END_ALLOW_THREADS
    return address == MAP_FAILED ? PyErr_SetFromErrno(PyExc_OSError) : map_of(type, address, (size_t)length);
}

static void map_dealloc(PyObject *object) {
    Map *self = (Map *)object;
    munmap(self->address, self->length);
    num_maps--;
    core_free(object);
}

static int map_getbuffer(PyObject *object, Py_buffer *view, int flags) {
    Map *self = (Map *)object;
    return PyBuffer_FillInfo(view, object, self->address, (Py_ssize_t)self->length, 1, flags);
}

/* random(): another map of the same file without read-ahead, or None where the system cannot. */
static PyObject *map_random(PyObject *object, PyObject *args) {
    (void)args;
#if defined(__linux__) && defined(MADV_RANDOM)
    Map *self = (Map *)object;
    void *address = mremap(self->address, 0, self->length, MREMAP_MAYMOVE); /* of length 0: a shared map is doubled */
    if (address == MAP_FAILED) Py_RETURN_NONE;
    (void)madvise(address, self->length, MADV_RANDOM);
    return map_of(Py_TYPE(object), address, self->length);
#else
    (void)object;
    Py_RETURN_NONE;
#endif
}

static PyMethodDef map_methods[] = {
    {"random", map_random, METH_NOARGS, "random(): another map of the same bytes without read-ahead, or None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot map_slots[] = {
    {Py_tp_doc, "Map(fd, length, random=False): a read-only map of a file's first bytes; fd may be closed at once."},
    {Py_tp_new, (void *)map_new},
    {Py_tp_dealloc, (void *)map_dealloc},
    {Py_tp_methods, (void *)map_methods},
    {Py_bf_getbuffer, (void *)map_getbuffer},
    {0, NULL},
};

static PyObject *map_count(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    return PyLong_FromLongLong(num_maps);
}

static PyMethodDef map_functions[] = {
    {"num_maps", map_count, METH_NOARGS, "num_maps(): how many Maps this process has."},
    {NULL, NULL, 0, NULL},
};

int core_add_map(PyObject *module) {
    if (PyModule_AddFunctions(module, map_functions) < 0) return -1;
    return core_add_type(module, "millrace._core.Map", sizeof(Map), map_slots, NULL);
}
#endif
