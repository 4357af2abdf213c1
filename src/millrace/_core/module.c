/* The module object. Every function here has a Python or numpy twin that gives the same bytes. */
#include "core.h"

static int core_exec(PyObject *module) {
    if (core_add_table(module) < 0) return -1;
    return core_add_map(module);
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
